"""The Inception and a reference, ready to score pictures: features are extracted once and kept."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from inception import Inception, load_inception
from parts import Parts
from picture_sets import Pictures
from reference import Reference
from scoring import extract_parts, feature_parts
from tread.runtime.distributed import Processes
from tread.runtime.files import sha256


@dataclass(frozen=True)
class Judge:
    """The reference, and the Inception by whose features pictures are compared with it."""

    reference: Reference
    network: Inception
    weights: str  # sha256 of the Inception's file
    features: Parts | None  # of the reference's pictures
    seconds: float  # that these took to extract


def open_judge(reference: Reference, weights: Path, cache: Path, processes: Processes) -> Judge:
    """The Inception, and the features of the reference's pictures, from the cache or extracted into it."""
    network, digest, features = load_inception(weights, processes.device), sha256(weights), None
    began = time.perf_counter()
    if reference.pictures is not None:
        features = features_of(reference.pictures, cache, network, digest, processes)
    return Judge(reference, network, digest, features, time.perf_counter() - began)


def features_of(pictures: Pictures, folder: Path, network: Inception, weights: str, processes: Processes) -> Parts:
    """Features of a set of pictures, kept below a folder; all processes extract their share of what is missing."""
    parts = feature_parts(folder, pictures, weights)
    with processes.lock(parts.folder.with_suffix(".lock")):
        with processes.main_first():
            if processes.main:
                parts.begin()
        mine = processes.from_main(parts.missing)[processes.rank :: processes.count]
        total = sum(len(parts.ranges[number]) for number in mine)
        with processes.bar(f"features of {Path(pictures.where).name}", total) as progress:
            for done in extract_parts(network, pictures, parts, mine):
                progress.update(done)
        processes.wait()
        if processes.main and (missing := parts.missing()):
            raise OSError(f"parts {missing} of {parts.folder} are missing: all processes must share cache={folder}")
    return parts
