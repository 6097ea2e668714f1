"""A tiny dataset of captioned RGB pictures with text of some encoders, and a text network on it with random weights."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from conftest import randomized

from tread.checkpoints import checkpoint
from tread.checkpoints.network import build_network, read_network
from tread.data.captions import add_captions
from tread.data.dataset import LatentDataset
from tread.data.latents import LatentSpec
from tread.data.section_writer import TextWriter
from tread.data.writer import write_dataset
from tread.encoders.language import TextEncoder

PIXELS = LatentSpec(shape=(3, 16, 16), classes=("picture",), autoencoder="pixels", scale_applied=True)


def write_captioned(folder: Path, captions: Sequence[Sequence[str]], *encoders: TextEncoder) -> np.ndarray:
    """Random pictures (n, 3, 16, 16) uint8, which are returned, with these captions and their text."""
    pictures = np.random.default_rng(len(captions)).integers(0, 256, (len(captions), 3, 16, 16), dtype=np.uint8)
    stored = (pictures[:, None] / 127.5 - 1).astype(np.float32)
    write_dataset(folder, PIXELS, [(stored, np.zeros(len(captions), dtype=np.int64))])
    add_captions(folder, captions)
    for encoder in encoders:
        writer = TextWriter(folder, encoder.spec, [len(own) for own in captions])
        writer.begin()
        writer.write(0, [encoder.encode([caption for own in captions for caption in own])])
        writer.write(1, [encoder.encode([""])])
        writer.publish()
    return pictures


def save_text_checkpoint(run: Path, config: dict, folder: Path, encoder: TextEncoder, step: int = 1) -> None:
    """A checkpoint of a network whose weights are all random, so that every word matters."""
    data = LatentDataset(folder, text=encoder.spec.encoder)
    spec = {key: getattr(encoder.spec, key) for key in encoder.spec.__dataclass_fields__}
    config = {**config, "text": {**spec, "vocabulary": spec["vocabulary"] and list(spec["vocabulary"])}}
    network = randomized(partial(build_network, read_network(config)), step, 0.1)
    network.take_null(data.encoded.null)
    parts = {part: network.state_dict() for part in ("model", "ema")}
    info = {"config": config, "latents": PIXELS.__dict__, "samples": len(data), "versions": {}}
    checkpoint.save(run, step, parts, info)
