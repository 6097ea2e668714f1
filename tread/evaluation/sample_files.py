"""Writes samples as a grid, single files, a batch in ADM's format, or latents, and records how they were made."""

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from tread.checkpoints.for_sampling import SavedNetwork
from tread.diffusion.sampling import Sampler
from tread.drawing.grids import FACTS, draw_grid, name_rows, save_png
from tread.evaluation.image_sets import save_npz
from tread.runtime.files import check_place, explain_failure, whole_file
from tread.runtime.tensor_files import save_tensors
from tread.runtime.versions import versions

DEFAULTS = {False: "samples.png", True: "samples.safetensors"}  # `latents` → file name
MEANING = "the autoencoder's z, which its decoder takes: the network's latents, their scale and normalisation undone"


def parse_seeds(seeds: str | int | Sequence[int]) -> Sequence[int]:
    """Return seeds as a sequence: "0-15" as range(16), a number or list as a list. Raises ValueError otherwise."""
    if isinstance(seeds, str) and (match := re.fullmatch(r"(\d+)-(\d+)", seeds)) and int(match[1]) <= int(match[2]):
        return range(int(match[1]), int(match[2]) + 1)
    seeds = [int(seeds)] if isinstance(seeds, (int, np.integer)) else seeds
    if isinstance(seeds, str) or not len(seeds):
        raise ValueError(f"seeds is {seeds!r}, but must be a-b with a at most b, a number or a list of numbers")
    return list(seeds)


def check_name(out: str | None, latents: bool) -> None:
    """Raise ValueError unless `out` is a valid output path: with `latents`, a .safetensors file; else a .png file (a
    grid), a .npz file (a batch in ADM's format) or a folder. None stands for the default name."""
    suffix = ".safetensors" if out is None and latents else Path(out or "").suffix.lower()
    if latents != (suffix == ".safetensors"):
        raise ValueError(f"out is {out!r}, but save_latents=true writes a .safetensors file, and nothing else does")
    file_in_folder = str(out).endswith("/") and suffix in (".png", ".npz", ".safetensors")
    if out == "" or file_in_folder or suffix in (".jpg", ".jpeg", ".webp", ".gif", ".npy"):
        raise ValueError(f"out is {out!r}, but must be a grid's name in .png, a batch's in .npz, or a folder")


def facts_of(settings: Mapping, sampler: Sampler, saved: SavedNetwork, weak: SavedNetwork | None) -> dict:
    """Return how samples were made, as a dict for JSON: networks, NFE, versions and the user's `settings`,
    with `sampler`'s options and the time shift as actually used. `weak` is guidance's second network, if any."""

    def network(source: SavedNetwork) -> dict:
        told = {"step": source.found.step, "weights": source.weights, "sha256": source.sha256}
        return told | ({"revision": source.found.revision} if source.found.revision else {})

    churn = {key: value for key, value in asdict(sampler.churn).items() if math.isfinite(value)}  # JSON has no infinity
    known = {"shift": saved.shift, "churn": churn if sampler.churn.amount else None}
    facts = {
        "settings": {**settings, **asdict(sampler), **known},
        "network": network(saved),
        "weak_network": weak and network(weak),
        "nfe": sampler.nfe(saved.process),
        "versions": versions(),
    }
    attribution = saved.found.info.get("attribution")
    return facts | {"attribution": attribution} if attribution else facts


def describe_drawing(network: SavedNetwork, sampler: Sampler, cost: float) -> str:
    """Return a line on how samples are drawn. `cost`: their FLOPs relative to no guidance (see relative_cost)."""
    shift = f" and shift {network.shift:g}" if network.shift not in (None, 1) else ""
    churn = f" and churn {sampler.churn.amount:g}" if sampler.churn.amount else ""
    relative = "" if sampler.guidance.kind == "none" else f"{cost:.3f} times the FLOPs of no guidance, "
    return (
        f"step {network.found.step}, {network.weights} weights, {sampler.solver} with {sampler.steps} steps{shift}"
        f"{churn}, NFE {sampler.nfe(network.process)}, guidance {sampler.guidance.describe()}, "
        f"{relative}{sampler.precision}"
    )


@dataclass(frozen=True)
class SampleFiles:
    """Writes samples as a grid (x.png), in ADM's format (x.npz), as latents (x.safetensors), or as files in a folder.

    A file of latents holds `latents` (n, C, S, S) fp32, `seeds` and `labels` (n,); metadata say how they were made.

    out        the path. None: samples.png (latents: .safetensors) or, if that exists and must stay, samples-1.png, ….
    overwrite  whether existing files are replaced; if not, `check` raises ValueError for them unless `out` is None.
    seeds      the seeds; the grid has a column for each.
    labels     the labels; the grid has a row for each.
    classes    the dataset's class names, or the prompts. A label ≥ len(classes) means no class.
    latents    whether latents are written instead of pictures.
    prompts    whether labels are indices of prompts, not of classes.
    """

    out: Path | None
    overwrite: bool
    seeds: Sequence[int]
    labels: Sequence[int]
    classes: Sequence[str]
    latents: bool
    prompts: bool

    @property
    def form(self) -> str:
        """The format: "grid", "npz", "latents" or "folder"."""
        suffix = (self.out or Path(DEFAULTS[self.latents])).suffix.lower()
        return {".png": "grid", ".npz": "npz", ".safetensors": "latents"}.get(suffix, "folder")

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(label, seed) of each picture, row by row."""
        return list(itertools.product(self.labels, self.seeds))

    def check(self) -> None:
        """Create the output folder. Raises OSError if it is not writable; ValueError if existing files may not be
        replaced, two pictures would have the same name, or seeds of latents do not fit into 64 bits."""
        if self.latents and (large := [seed for seed in self.seeds if not -(2**63) <= seed < 2**63]):
            raise ValueError(f"seed {large[0]} does not fit into the 64 bits that a file of latents has for it")
        if self.out is None:
            return check_place(Path(), 0)
        paths = [self._single(*pair) for pair in self.pairs] if self.form == "folder" else [self.out]
        if len(set(paths)) < len(paths):
            raise ValueError(f"out={self.out} is a folder, but seeds or classes name some of its pictures twice")
        there = [path for path in paths if path.exists()]
        if there and not self.overwrite:
            raise ValueError(f"{there[0]} is there already: name another out=…, or replace it by overwrite=true")
        if folders := [path for path in there if path.is_dir()]:
            raise ValueError(f"{folders[0]} is a folder, but a file is to be written there: name another out=…")
        check_place(self.out if self.form == "folder" else self.out.parent, 0)

    def write(self, batches: Iterable[np.ndarray], facts: Mapping) -> tuple[Path, bool]:
        """Write batches of pictures (b, 1 or 3, H, W) uint8, or of latents, in the order of self.pairs; `facts` become
        metadata (not of an .npz). Returns the path, and whether grey pictures became RGB, as in an .npz or a folder."""
        grey, labels = False, [label for label, _ in self.pairs]
        grid_facts = {**facts, "rows": [self._told(label) | {"seeds": list(self.seeds)} for label in self.labels]}

        def rgb() -> Iterator[np.ndarray]:
            nonlocal grey
            for batch in batches:
                grey = batch.shape[1] == 1
                yield batch.repeat(3 // batch.shape[1], axis=1)

        path = self.out or self._free()
        with explain_failure(path):
            if self.form == "grid":
                save_png(path, self.grid(np.concatenate(list(batches))), grid_facts)
            elif self.form == "npz":
                save_npz(path, rgb(), np.array(labels))
            elif self.form == "latents":
                tensors = {"seeds": torch.tensor([*self.seeds] * len(self.labels)), "labels": torch.tensor(labels)}
                tensors["latents"] = torch.from_numpy(np.concatenate(list(batches)))
                with whole_file(path) as partial:
                    save_tensors(partial, tensors, {"meaning": MEANING, FACTS: json.dumps(grid_facts)})
            else:
                for (label, seed), picture in zip(self.pairs, itertools.chain.from_iterable(rgb())):
                    about = {"seed": seed} | self._told(label)
                    save_png(self._single(label, seed), Image.fromarray(picture.transpose(1, 2, 0)), {**facts, **about})
        return path, grey

    def describe(self, path: Path, grey: bool, seeds: object) -> str:
        """Return a line on what `path` holds. seeds: the option as the user gave it; grey: whether grey became RGB."""
        told = [(label, self._name(label)) for label in self.labels]
        shown = [f"{n}" if name == str(n) else f"{n} ({name})" if n < len(self.classes) else "null" for n, name in told]
        what = f"classes [{', '.join(shown)}]"
        if self.prompts:
            first = self.classes[0]
            first = json.dumps(first if len(first) <= 60 else first[:59] + "…", ensure_ascii=False)
            what = f"{len(self.classes)} prompts from {first} on" if self.classes[1:] else f"prompt {first}"
        rgb = ", grey as RGB of three equal channels" if grey else ""
        if self.form == "grid":
            return f"{path}: rows are {what}, columns seeds {seeds}{rgb}"
        return f"{path}: {len(self.pairs)} {'latents' if self.latents else 'pictures'} of {what}, seeds {seeds}{rgb}"

    def _free(self) -> Path:
        stem, _, suffix = DEFAULTS[self.latents].partition(".")
        names = (Path(f"{stem}-{n}.{suffix}" if n else f"{stem}.{suffix}") for n in itertools.count())
        return next(path for path in names if self.overwrite or not path.exists())

    def _single(self, label: int, seed: int) -> Path:
        name = f"prompt{label}" if self.prompts else f"class{label}"
        return self.out / f"seed{seed:06d}_{name if label < len(self.classes) else 'noclass'}.png"

    def _name(self, label: int) -> str:
        return self.classes[label] if label < len(self.classes) else "no class"

    def _told(self, label: int) -> dict:
        name = self._name(label)
        return {"prompt": name} if self.prompts else {"class": label, "class_name": name}

    def grid(self, pictures: np.ndarray) -> Image.Image:
        """Draw pictures (n, 1 or 3, H, W) uint8 as a grid. Beside each row is its prompt, its class's number and name,
        or "no class"; nothing if all rows' class names are just their numbers."""
        grid, names = draw_grid(pictures, len(self.seeds)), [self._name(label) for label in self.labels]
        if self.prompts:
            return name_rows(grid, names)
        if names == [str(label) for label in self.labels]:
            return grid
        known = len(self.classes)
        return name_rows(grid, [f"{n} {name}" if n < known else name for n, name in zip(self.labels, names)])
