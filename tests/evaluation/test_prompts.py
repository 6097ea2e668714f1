"""Prompts at the doors. The references: what the network draws of the encoder's own text, the dataset's stored text and
pictures, and transformers' CLIP called by hand."""

import json
import sys
from dataclasses import replace
from functools import partial

import conftest
import guidance_sweep
import numpy as np
import pytest
import torch
from captioned import PIXELS, save_text_checkpoint, write_captioned
from conftest import CPU, assert_refused, facts_in, launch_door, opened, read_json, score, take_samples, write_json
from PIL import Image
from safetensors import safe_open
from tiny_text import save_encoder

import sample
from tread.data.dataset import LatentDataset
from tread.data.writer import write_dataset
from tread.diffusion.guidance import NO_GUIDANCE, Guidance
from tread.diffusion.labels import seeded_labels
from tread.diffusion.sampling import Model, Sampler, draw, to_pictures
from tread.drawing.grids import FACTS, GAP, draw_grid, name_rows
from tread.encoders.autoencoder import load_decoder
from tread.encoders.language import text_encoder
from tread.evaluation import scoring
from tread.evaluation.prompts import read_prompts
from tread.evaluation.similarity import open_latents
from tread.runtime import cli

TRAIN = [["a red apple"], ["an apple, cut open", "half an apple"], ["a woman with a hat"]] * 2
HELD = [["a red hat", "hat"], ["a man cut open"], ["an open apple"]]
FLAT = [caption for own in TRAIN for caption in own]
SAMPLE = ("checkpoint=results/words", "steps=2", "seeds=0-1")
FID = ("steps=2", "batch_size=4", "num_samples=9")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data with text of words and of a frozen encoder, and a network of each; and one of classes."""
    folder = tmp_path_factory.mktemp("prompts")
    bert = save_encoder(folder / "bert", "bert")
    encoders = [text_encoder(name, FLAT) for name in ("words", str(bert))]
    write_captioned(folder / "data/train", TRAIN, *encoders)
    write_captioned(folder / "data/heldout", HELD, *encoders)
    return folder


@pytest.fixture(autouse=True)
def runs(folder, composed):
    if (folder / "results").exists():
        return
    for name, where in (("words", "words"), ("bert", str(folder / "bert"))):
        config = composed(
            "dataset=folder", f"dataset.path={folder}/data/train", "model=tread_text", "model.hidden_size=32",
            "model.depth=6", "model.num_heads=2", "model.patch_size=4", f"name={name}",
        )  # fmt: skip
        config["dataset"] |= {"channels": 3, "size": 16, "num_classes": 1, "heldout": str(folder / "data/heldout")}
        encoder = text_encoder(where, FLAT)
        for step in (1, 2) if name == "words" else (1,):
            save_text_checkpoint(folder / "results" / name, config, folder / "data/train", encoder, step)
    conftest.save_checkpoint(folder / "results/classes", composed)


def launch(folder, *overrides: str) -> str:
    return take_samples(folder, *SAMPLE, *overrides)


def refusal(folder, *overrides: str, door=launch) -> str:
    with pytest.raises(SystemExit) as stopped:
        door(folder, *overrides)
    return str(stopped.value)


def expected(folder, run: str, prompts, seeds, labels, size: int, guidance: Guidance = NO_GUIDANCE):
    """Latents drawn of a text by hand."""
    model = opened(folder / "results" / run).load(CPU, guidance)
    sampler = Sampler(2, size, guidance=guidance)
    return torch.cat(list(draw(Model(model.process, model.network, model.routes, prompts), seeds, labels, sampler)))


TEXTS = ["a red apple, cut open", "", "${checkpoint} {a: b} [x] = 'q' \"d\" \\ \\' \\${x}", "null", "7", "日本 = –"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_prompt_is_taken_literally(text, composed, monkeypatch):
    """Whatever Hydra would make of it; other words stay."""
    words = ["checkpoint=a", f"prompt={text}", "steps=3", "prompt", "prompts=b"]
    taken = cli.take_literally(words, ("prompt",))
    assert taken[0::2] == words[0::2] and taken[3] == "prompt"
    assert composed(*taken[:3], name="sample")["prompt"] == text

    def main() -> None:
        seen.extend(sys.argv[1:])

    seen, main.__wrapped__ = [], sample.main.__wrapped__
    monkeypatch.setattr(cli, "leave_at_once", lambda code: None)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "")
    monkeypatch.setattr(sys, "argv", ["sample.py", *words[:3]])
    cli.open_door(main, ["checkpoint", "prompt", "steps"], literal=("prompt",))
    assert seen == taken[:3]  # what Hydra meets


@pytest.mark.parametrize("run", ["words", "bert"])
def test_the_network_sees_the_prompt_as_its_encoder_has_it(folder, run):
    """Prompts from a file are drawn, under guidance too; the grid, the facts and the numbers in files are theirs."""
    prompts = ["a red apple, cut open", "a hat"]
    (folder / "p.txt").write_bytes("\n".join(prompts).encode() + b"\r\n")
    out = f"{run}.safetensors"
    guided = ("guidance=sparse", "guidance.scale=2", "guidance.weak=0.5", "guidance.strong=0")
    launch(folder, f"checkpoint=results/{run}", "prompts=p.txt", "save_latents=true", f"out={out}", *guided)
    text = text_encoder("words" if run == "words" else str(folder / "bert"), FLAT).encode(prompts)
    guidance = Guidance("sparse", 2.0, 0.0, 0.5)
    found = expected(folder, run, text, [0, 1] * 2, torch.tensor([0, 0, 1, 1]), 4, guidance)
    with safe_open(folder / out, "pt") as file:
        assert torch.equal(file.get_tensor("latents"), found) and not torch.equal(found[0], found[2])
        assert file.get_tensor("labels").tolist() == [0, 0, 1, 1]
        assert json.loads(file.metadata()[FACTS])["rows"][1] == {"prompt": "a hat", "seeds": [0, 1]}


def test_a_grid_names_its_prompts_and_files_say_theirs(folder):
    said = launch(folder, "prompt=a red apple, cut open", "out=grid.png")
    assert 'rows are prompt "a red apple, cut open", columns seeds 0-1; step 2' in said and "note" not in said
    image = Image.open(folder / "grid.png")
    assert json.loads(image.text[FACTS])["rows"] == [{"prompt": "a red apple, cut open", "seeds": [0, 1]}]
    text = text_encoder("words", FLAT).encode(["a red apple, cut open"])
    drawn = to_pictures(expected(folder, "words", text, [0, 1], torch.tensor([0, 0]), 2), load_decoder(PIXELS))
    shown = np.asarray(image)
    assert np.array_equal(shown[:, -(2 * 64 + GAP) :], draw_grid(drawn.numpy(), 2))
    assert (shown[:, : -(2 * 64 + GAP)] < 128).any()
    launch(folder, "prompt=a hat", "out=single")
    assert {path.name for path in (folder / "single").iterdir()} == {f"seed00000{n}_prompt0.png" for n in (0, 1)}
    facts = facts_in(folder / "single/seed000001_prompt0.png")
    assert (facts["seed"], facts["prompt"]) == (1, "a hat") and "class" not in facts


def test_long_names_are_wrapped_where_rows_have_room():
    """On more lines, none wider than a short name's limit; what does not fit ends in …"""
    grid = Image.fromarray(np.zeros((3 * (64 + GAP) - GAP, 64, 3), dtype=np.uint8))
    words = " ".join(["word"] * 12)
    named = np.asarray(name_rows(grid, ["a", words, words * 9]))

    def inked(row: int) -> int:
        margin = named[row * (64 + GAP) : row * (64 + GAP) + 64, : named.shape[1] - 64]
        return int((margin < 128).any(axis=(1, 2)).sum())

    assert 12 < 2 * inked(0) < inked(1) <= inked(2) <= 64
    assert named.shape[1] <= 64 + 13 * 12 + 2


def test_what_the_network_does_not_see_is_said(folder):
    said = launch(folder, "prompt=a blue apple, purple " + "word " * 40, "out=long.png", "overwrite=true")
    assert "1 texts have words that are not in the vocabulary, which are all alike: blue, purple, word\n" in said
    assert "1 of 1 texts are cut off after 8 tokens; the longest has 45" in said
    assert 'rows are prompt "a blue apple, purple word' in said and "word " * 12 not in said
    said = launch(folder, "checkpoint=results/bert", "prompt=" + "word " * 40, "out=long.png", "overwrite=true")
    assert "after 8 tokens; the longest has 42" in said and "vocabulary" not in said


def test_what_can_not_be_is_refused(folder):
    for name, content in (("none.txt", b""), ("blank.txt", b"a hat\n\nan apple\n"), ("bad.txt", b"\xff\xfe\x00")):
        (folder / name).write_bytes(content)
    save_encoder(folder / "other", "clip")
    before = sorted(folder.iterdir())
    assert_refused(
        partial(launch, folder),
        ("prompt=", "prompt is blank"),
        ("prompt=  ", "prompt is blank"),
        ("was trained with captions",),
        ("classes=[0]", "takes no classes: prompt='…'"),
        ("prompt=a", "classes=[0]", "takes no classes"),
        ("prompt=a", "prompts=p.txt", "both given"),
        ("prompts=nowhere.txt", "No such file or directory"),
        ("prompts=none.txt", "none.txt is blank in line 1"),
        ("prompts=blank.txt", "blank.txt is blank in line 2"),
        ("prompts=bad.txt", "bad.txt is not UTF-8"),
        ("checkpoint=results/classes", "prompt=a", "was trained with classes, and takes no prompt"),
        ("prompt=a", "text_encoder=other", "holds its words: leave it out"),
        ("checkpoint=results/bert", "prompt=a", "text_encoder=other", "is another encoder than the text was made"),
        ("prompt=a", "guidance=autoguidance", "guidance.checkpoint=results/bert", "differ in text"),
    )
    assert sorted(folder.iterdir()) == before


def test_an_encoder_may_have_moved_and_files_keep_their_prompts(folder, tmp_path):
    (folder / "bert").rename(folder / "moved")
    try:
        said = refusal(folder, "checkpoint=results/bert", "prompt=a hat", "out=moved.png")
        assert "bert' could not be loaded" in said and "If it has moved, text_encoder=<hub id or folder> names" in said
        launch(folder, "checkpoint=results/bert", "prompt=a hat", "out=moved.png", "text_encoder=moved")
    finally:
        (folder / "moved").rename(folder / "bert")
    (tmp_path / "p").write_text("\ufeffa, b=c \n'd'\n", encoding="utf-8")
    assert read_prompts(None, str(tmp_path / "p")) == ("a, b=c ", "'d'")


def test_autoguidance_by_an_earlier_checkpoint(folder):
    launch(folder, "prompt=a hat", "guidance=autoguidance", "guidance.checkpoint=results/words/step_0000001",
           "guidance.scale=2", "out=auto.png")  # fmt: skip
    assert facts_in(folder / "auto.png")["weak_network"]["step"] == 1


# -------------------------------------------------------------------------------------------- fid.py


@pytest.fixture(scope="module")
def clip(folder):
    """A folder with a tiny CLIP of random weights."""
    from transformers import CLIPConfig, CLIPModel

    place = save_encoder(folder / "clip", "clip")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    words = {"vocab_size": 14, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "max_position_embeddings": 12}
    torch.manual_seed(0)
    vision = {**sizes, "image_size": 16, "patch_size": 8}
    CLIPModel(CLIPConfig(text_config=sizes | words, vision_config=vision, projection_dim=16)).save_pretrained(place)
    about = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}, "resample": 3}
    about |= {"image_mean": [0.5] * 3, "image_std": [0.25] * 3, "image_processor_type": "CLIPImageProcessor"}
    write_json(place / "preprocessor_config.json", about)
    return place


def test_held_out_captions_are_scored_against_their_pictures(folder, clip, inception_file, monkeypatch):
    """Drawn by the samples' seeds, of the stored text; the CLIP score by hand, and stopped parts go on."""
    from transformers import AutoTokenizer, CLIPModel

    words = ("checkpoint=results/words", f"inception={inception_file}", *FID, f"clip={clip}")
    words += ("prompts=heldout", "save_samples=true", "reference=heldout", "out=scored")
    calls = conftest.interrupt(monkeypatch, scoring, "draw_pictures", 2)
    refusal(folder, *words, door=score)
    said = score(folder, *words)
    assert [list(seeds) for _, _, seeds, *_ in calls] == [[0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7], [8]]
    found = read_json(folder / "scored/fid.json")
    numbers = seeded_labels(range(9), 4, "random")
    data = LatentDataset(folder / "data/heldout", text="words")
    latents = expected(folder, "words", data.encoded.read(numbers.numpy()), range(9), torch.arange(9), 4)
    drawn = to_pictures(latents, load_decoder(PIXELS))
    with np.load(folder / "scored/samples.npz") as samples:
        assert np.array_equal(samples["arr_0"], drawn.permute(0, 2, 3, 1))
        assert np.array_equal(samples["arr_1"], numbers)
    captions = [caption for own in HELD for caption in own]
    model, tokenizer = CLIPModel.from_pretrained(clip), AutoTokenizer.from_pretrained(clip)
    given = tokenizer([captions[number] for number in numbers], padding=True, return_tensors="pt")
    given = {name: given[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        made = model(**given, pixel_values=(drawn / 255 - 0.5) / 0.25)
    image, text = (embeds / embeds.norm(dim=1, keepdim=True) for embeds in (made.image_embeds, made.text_embeds))
    cosine = (image * text).sum(1)
    assert found["clip_score"] == pytest.approx(100 * cosine.clamp(min=0).mean().item(), rel=1e-4)
    assert found["reference_count"] == 3 and found["prompts"] == found["reference"] == str(folder / "data/heldout")
    assert "CLIP score" in said and {"fid", "kid", "clip_score"} <= found["counts"].keys()
    assert "is scored already" in score(folder, *words)
    pictures, stored = conftest.open_pictures(folder / "data/heldout"), np.random.default_rng(3)
    stored = stored.integers(0, 256, (3, 3, 16, 16), dtype=np.uint8)
    assert pictures.resolution == (16, 16) and np.array_equal(pictures.read(1, 3), stored[1:3])


@pytest.mark.slow
def test_balanced_captions_and_a_sweep(folder, clip, inception_file):
    """Each caption equally often; without a reference's name the held-out pictures are it."""
    words = ("checkpoint=results/words", f"inception={inception_file}", *FID, f"clip={clip}", "num_samples=8")
    launch_door(
        guidance_sweep.main, "guidance_sweep", folder, *words, "labels=balanced", "guidance=cfg", "sweep.scale=[2]",
        "sweep.metric=clip_score", "out=sweep", "sweep.baseline=false", "cache=cache", "save_samples=true",
        "reference=heldout",
    )  # fmt: skip
    with np.load(folder / "sweep/scale2/samples.npz") as samples:
        assert samples["arr_1"].tolist() == [0, 1, 2, 3] * 2
    assert "clip_score" in (folder / "sweep/sweep.csv").read_text().splitlines()[0]
    text = score(folder, *words, "labels=balanced", "out=default")
    record = read_json(folder / "default/fid.json")
    assert "FID" in text and record["reference"] == str(folder / "data/heldout")


def test_what_can_not_be_scored_is_refused(folder, clip, inception_file, tmp_path):
    other = write_captioned(tmp_path / "other", HELD, text_encoder("words", ["other words"]))
    write_captioned(tmp_path / "none", HELD)
    assert len(other) == 3
    with pytest.raises(ValueError, match="other text than .* was trained with"):
        open_latents(opened(folder / "results/words"), str(tmp_path / "other"))
    (tmp_path / "p.txt").touch()
    words, classes = "checkpoint=results/words", "checkpoint=results/classes"
    assert_refused(
        partial(score, folder, f"inception={inception_file}", *FID, f"out={tmp_path}/refused"),
        (words, "prompts=nowhere", "no dataset at nowhere"),
        (words, f"prompts={tmp_path}/none", "has no text of encoder words"),
        (words, f"prompts={tmp_path}/other", "has other text than .* was trained with"),
        (words, "prompts=p.txt", "no dataset at p.txt"),
        (words, "clip=nowhere", "clip=nowhere could not be loaded"),
        (words, f"clip={folder}/bert", "it is a bert, and not a clip"),
        (words, "crop=16", "reference=heldout", "is a dataset, whose pictures are cropped already"),
        (classes, "prompts=heldout", "prompts=heldout is for captions, but .* with classes"),
        (classes, f"clip={clip}", "is for captions, but .* with classes"),
        (classes, "reference=heldout", "has no held-out data"),
        ("samples=x", "clip=y", "taken without captions"),
    )
    latents = replace(PIXELS, autoencoder="x", scale_applied=False)
    write_dataset(tmp_path / "latents", latents, [(np.zeros((3, 1, 3, 16, 16), np.float32), np.zeros(3, np.int64))])
    with pytest.raises(ValueError, match="keeps no pictures"):
        conftest.open_pictures(tmp_path / "latents")
    assert not (tmp_path / "refused").exists() or not list((tmp_path / "refused").glob("*.json"))
