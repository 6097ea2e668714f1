"""The CLIP score, how well pictures fit their captions: 100·max(cos, 0) of CLIP's two embeddings (arXiv 2104.08718).

The factor 100 is usual in text-to-image papers; the cited paper uses 2.5. Scores of different CLIP models, such as
ViT-L/14 and ViT-B/32, are not comparable, so fid.json's settings include a hash of the weights."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tread.encoders.pretrained import TOKENIZER, hash_of_text_model, load_pretrained
from tread.runtime.device import exact

AT_ONCE = 64  # pictures per batch


class ClipScore:
    """CLIP's picture and text encoders, in fp32. `name` is a hub id, or a folder saved by transformers. The attribute
    `sha256` is the hash of the loaded weights and vocabulary. Raises ValueError if the model can't be loaded."""

    def __init__(self, name: str, device: torch.device | str) -> None:
        known = (
            "It must be a hub id (to be downloaded once while online) or a folder of a whole CLIP, such as "
            "openai/clip-vit-large-patch14"
        )
        parts = (TOKENIZER, ("CLIPImageProcessorPil", "CLIPImageProcessor"))  # Pillow resizes as in CLIP's own code
        model, (self._tokenizer, self._processor) = load_pretrained(
            f"clip={name}", name, {"clip": "CLIPModel"}, "requirements-text.txt", known, parts=parts
        )
        self._model, self._device = model.to(device), device
        self.sha256 = hash_of_text_model(model, self._tokenizer)

    @torch.no_grad()
    def score(self, pictures: Tensor, captions: Sequence[str]) -> np.ndarray:
        """Return scores (n,) float32 in 0..100 of pictures (n, 1 or 3, H, W) uint8 and n captions, cut at 77 tokens."""
        length, scores = self._model.config.text_config.max_position_embeddings, []
        cut = {"truncation": True, "max_length": length, "padding": "max_length"}
        for start in range(0, len(pictures), AT_ONCE):
            rgb = pictures[start : start + AT_ONCE].cpu().expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()
            x = self._processor(images=list(rgb), input_data_format="channels_last", return_tensors="pt")
            words = self._tokenizer(list(captions[start : start + AT_ONCE]), **cut, return_tensors="pt")
            given = {name: words[name].to(self._device) for name in ("input_ids", "attention_mask")}
            with exact():
                made = self._model(**given, pixel_values=x["pixel_values"].float().to(self._device))
            scores.append(100 * F.cosine_similarity(made.image_embeds, made.text_embeds).clamp(min=0).cpu())
        return torch.cat(scores).numpy()
