"""U-ViT's features of MS-COCO, written as its extraction writes them, and imported: against the arrays themselves."""

from __future__ import annotations

import gc
import json
import os
import sys

import import_latents
import numpy as np
import pytest
import torch

from tread.data.dataset import LatentDataset
from tread.data.index import read_index
from tread.data.latents import to_network
from tread.preparing import uvit
from tread.runtime import schema

COUNTS = [2, 1, 3]
CAPTIONS = [["a red apple", "fruit"], ["a giraffe"], ["flowers", "a vase", "Blumen"]]
IDS = [9, 25, 30]


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape, np.float32)


MOMENTS, EMPTY = numbers(3, 8, 4, 4), numbers(77, 768)
TEXTS = [numbers(count, 77, 768) for count in COUNTS]


@pytest.fixture
def source(tmp_path):
    """features/train/ and features/empty_context.npy; annotations of other pictures too lie beside them."""
    folder = tmp_path / "features" / "train"
    folder.mkdir(parents=True)
    for index, (moments, texts) in enumerate(zip(MOMENTS, TEXTS)):
        np.save(folder / f"{index}.npy", moments)
        for number, text in enumerate(texts):
            np.save(folder / f"{index}_{number}.npy", text)
    np.save(folder.parent / "empty_context.npy", EMPTY)
    images = [{"id": number, "file_name": f"{number}.jpg"} for number in (30, 9, 25)]  # the features go by ids
    notes = [(IDS[index], own[i]) for i in range(3) for index, own in enumerate(CAPTIONS) if i < len(own)]
    listed = [{"image_id": number, "caption": words} for number, words in notes]
    (tmp_path / "captions.json").write_text(json.dumps({"images": images, "annotations": listed}))
    return folder


@pytest.fixture
def bring(composed, tmp_path, monkeypatch, source):
    """A function from overrides to the dataset tmp_path/<out>."""
    monkeypatch.chdir(tmp_path)

    def run(*overrides, out="data"):
        given = (
            "kind=uvit_coco",
            "source=features/train",
            f"out={out}",
            "autoencoder=pixels",
            "decode=0",
            "shard_size=2",
        )
        tree = composed(*given, *overrides, name="import_latents")
        import_latents.import_all(schema.read(tree, import_latents.ImportOptions))
        return LatentDataset(tmp_path / out, verify="full", text="clip-l")

    return run


@pytest.mark.parametrize("below", [False, True])
def test_latents_and_text_are_the_sources(bring, source, below, capsys):
    if below:  # the empty caption beside the pictures
        (source.parent / "empty_context.npy").rename(source / "empty_context.npy")
    data = bring("captions=captions.json")
    stored = data.read(np.arange(3)).stored
    assert np.array_equal(stored, MOMENTS.astype(np.float16)) and data.latents.classes == ("all",)
    noise = torch.randn(3, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    moments = torch.from_numpy(MOMENTS.astype(np.float16)).float()
    expected = 0.18215 * (moments[:, :4] + (moments[:, 4:] / 2).exp() * noise)  # as AutoencoderKL samples
    torch.testing.assert_close(to_network(stored, data.latents, noise), expected, rtol=1e-4, atol=1e-5)
    text, flat = data.text_of(np.arange(6)), np.concatenate(TEXTS).astype(np.float16)
    assert np.array_equal(text.tokens, flat) and text.mask.all() and text.pooled is None
    assert np.array_equal(data.null_text().tokens[0], EMPTY.astype(np.float16))
    assert [data.captions_of(index) for index in range(3)] == CAPTIONS
    spec = data.text_spec
    assert (spec.encoder, spec.fingerprint, spec.tokens, spec.width, spec.padding) == ("clip-l", None, 77, 768, True)
    assert "6 captions, with the captions as words" in capsys.readouterr().out


def test_without_annotations_the_captions_stay_unknown(bring, capsys):
    data = bring()
    assert "captions" not in read_index(data.folder) and "the captions as words unknown" in capsys.readouterr().out
    assert np.array_equal(data.text_of(np.array([3])).tokens[0], TEXTS[2][0].astype(np.float16))


def test_a_stopped_import_goes_on_and_ends_with_the_same_bytes(bring, tmp_path, monkeypatch, capsys):
    """Stopped in the latents, then in the text."""
    monkeypatch.setattr("tread.data.section_writer.SHARD", 2 * uvit.SPEC.caption_bytes)
    bring("captions=captions.json", out="whole")
    for writer in (import_latents.DatasetWriter, uvit.TextWriter):
        write = writer.write

        def stop(self, number, *arguments, write=write):
            write(self, number, *arguments) if number == 0 else sys.exit("stopped")

        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(writer, "write", stop)
            bring("captions=captions.json")
        gc.collect()  # the stopped one's locks
    first = tmp_path / ".data.unfinished" / "data" / ".text-clip-l.unfinished/data/text-clip-l-00000.npy"
    begun = first.stat().st_mtime_ns
    capsys.readouterr()
    bring("captions=captions.json")
    assert "work      0 of 2 shards" in capsys.readouterr().out
    ended, whole = ({p.name: p.read_bytes() for p in (tmp_path / out).iterdir()} for out in ("data", "whole"))
    assert ended == whole and (tmp_path / "data" / first.name).stat().st_mtime_ns == begun
    bring("captions=captions.json")
    assert capsys.readouterr().out.endswith("data is finished\n") and not (tmp_path / ".data.unfinished").exists()


def remove(name):
    return lambda source: (source / name).unlink()


def save(name, array):
    return lambda source: np.save(source / name, array)


def listing(*ids):
    images = [{"id": number, "file_name": f"{number}.jpg"} for number in ids]
    notes = [{"image_id": number, "caption": "a"} for number in ids]
    return lambda source: (source / "../../captions.json").write_text(
        json.dumps({"images": images, "annotations": notes})
    )


FAULTS = {  # what is done to the source, what the message says
    "a picture missing": (remove("1.npy"), "pictures that are missing: 1.npy; captions of missing pictures: 1_0.npy"),
    "the last one missing": (remove("2.npy"), "captions of missing pictures: 2_0.npy"),
    "a caption missing": (remove("2_1.npy"), "captions that are missing: 2_1.npy"),
    "no captions": (remove("1_0.npy"), "pictures without captions: 1.npy"),
    "no empty caption": (remove("../empty_context.npy"), "train/empty_context.npy is not there, nor features/empty"),
    "a caption cut short": (lambda s: os.truncate(s / "2_1.npy", 999), "damaged files, 2_1.npy has 999 bytes, where"),
    "a picture cut short": (lambda s: os.truncate(s / "1.npy", 99), "damaged files, 1.npy has 99 bytes, where others"),
    "words for numbers": (lambda s: (s / "0.npy").write_bytes(b"x" * (s / "0.npy").stat().st_size), "0.npy is damaged"),
    "latents": (
        lambda s: [np.save(s / f"{i}.npy", MOMENTS[i, :4]) for i in range(3)],
        r"must be \(8, S, S\): mean and",
    ),
    "another encoder": (save("../empty_context.npy", EMPTY[:, :512]), r"\(77, 512\), but must be \(77, 768\), as CLIP"),
    "other annotations": (listing(9, 25), "lists 2 pictures, but features/train holds 3"),
    "more captions": (listing(9, 25, 30), "captions.json has 1 captions of picture 0, but features/train 2"),
    "damaged annotations": (lambda s: (s / "../../captions.json").write_text("{"), "captions.json is damaged, or no"),
    "not finite": (save("0_1.npy", EMPTY * np.inf), "text holds numbers that are not finite"),
    "absent": (lambda s: s.rename(s.parent / "val"), "features/train is not there, or holds no 0.npy"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_what_is_not_as_u_vit_writes_it_is_refused(bring, source, tmp_path, fault):
    spoil, shown = FAULTS[fault]
    spoil(source)
    with pytest.raises((ValueError, OSError), match=shown):
        bring("captions=captions.json")
    assert not (tmp_path / "data").exists()
    if fault != "not finite":  # which is seen when it is read
        assert not (tmp_path / ".data.unfinished").exists()


def test_captions_are_of_uvit_coco_alone(bring):
    with pytest.raises(ValueError, match="captions=a.json, but repa_npy has classes; leave captions out"):
        bring("kind=repa_npy", "captions=a.json")
