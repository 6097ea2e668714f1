"""Guidance by hand: the controls of a page's side → pictures, what they cost, and sample.py's command for them.

The page itself is explore_page.py's. Drawing is sample.py's: the same functions, in the same order.
"""

from __future__ import annotations

import re
import shlex
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from PIL import Image

from routing_module import check_routes
from tread.checkpoints import checkpoint
from tread.checkpoints.trained import Trained, open_trained, open_weak
from tread.data import autoencoder
from tread.diffusion.guidance import KINDS, NO_GUIDANCE, Guidance
from tread.diffusion.sampling import Model, Sampler, check_ratios, class_labels, draw_pictures, relative_cost
from tread.diffusion.solvers import Solver
from tread.evaluation.sample_files import SampleFiles, parse_seeds
from tread.runtime.device import Precision, device_name, use_precision
from tread.runtime.schema import Count, Range, check, written
from tread.runtime.tensor_files import Weights

PICTURES_UP_TO = 256  # a side
DEFAULTS = {"batch_size": 64, "precision": "auto", "cpu_threads": None, "weights": "ema", "decode": True}  # sample.py's
NETWORKS, GRIDS = 4, 16  # that are kept, so that what was loaded or drawn already takes no time


@dataclass(frozen=True)
class Options:
    """configs/explore.yaml."""

    checkpoint: str
    port: Annotated[int, Range("lie in 1..65535", lambda number: 1 <= number <= 65535)]
    batch_size: Count
    precision: Precision
    cpu_threads: Count | None
    weights: Weights
    decode: bool
    autoencoder: str | None


def controls(kind: str) -> dict[str, bool]:
    """Which settings of a guidance have an effect for a kind, by the names of `Side`."""
    row = KINDS[kind]
    return {
        "scale": row.weak_class is not None,
        "interval": row.weak_class is not None,
        "strong": row.routed,
        "weak": row.routed,
        "checkpoint": row.weak_network != "never",
        "same_ids": row.routed,
        "force": row.routed,
    }


def branches(kind: str) -> str:
    """What a kind's two branches see, for people."""
    row = KINDS[kind]
    if row.weak_class is None:
        return "one pass a call: the class, all tokens"
    second = {"never": "", "may": ", or a second network", "must": ", a second, weaker network"}[row.weak_network]
    strong, weak = (
        ("class" if sees_class else "no class") + ", routed" * row.routed
        for sees_class in (row.strong_class, row.weak_class)
    )
    no_effect = "" if row.strong_class or row.weak_class else "; classes have no effect"
    weak += ", without the sparse part of a SPRINT" * row.drops_path
    return f"strong branch: {strong}; weak branch: {weak}{second}{no_effect}"


@dataclass(frozen=True)
class Side:
    """What the controls of one side say. Those without an effect for the kind (`controls`) say nothing.

    interval       lowest and highest noise level as text, "0.3, 5"; empty: all of them.
    checkpoint     of the weak network; empty: the strong one serves.
    steps, solver  None: the process's own.
    """

    kind: str
    scale: float = 1.5
    strong: float = 0.3
    weak: float = 0.7
    interval: str = ""
    checkpoint: str | None = None
    same_ids: bool = False
    force: bool = False
    steps: int | None = None
    solver: str | None = None

    def guidance(self) -> Guidance:
        """Raises ValueError for what can't be."""
        shown, names = controls(self.kind), ("scale", "strong", "weak", "same_ids", "force")
        given = {name: getattr(self, name) for name in names if shown[name]}
        for name, value in given.items():
            check(f"guidance.{name}", value, type(getattr(NO_GUIDANCE, name)))
        if shown["interval"] and self.interval.strip():
            given["interval"] = _read_interval(self.interval)
        if shown["checkpoint"] and (self.checkpoint or "").strip():
            given["checkpoint"] = self.checkpoint.strip()
        return Guidance(self.kind, **given)


@dataclass(frozen=True)
class Shown:
    """What a side shows: a grid as sample.py draws it, what it is and costs, and the command that draws it again."""

    grid: Image.Image
    told: str
    command: str


class Explorer:
    """A checkpoint that is drawn from again and again. Networks and pictures are kept; one drawing at a time.

    options      of the page.
    sample_door  how its user calls sample.py, a path.

    Raises ValueError or OSError for a checkpoint or an autoencoder that can't be used.
    """

    def __init__(self, options: Options, device: torch.device, sample_door: str) -> None:
        self.options, self.device, self.sample_door = options, device, sample_door
        self.precision = use_precision(options.precision, device)
        self._lock, self._networks, self._drawn = threading.Lock(), {}, {}
        found = checkpoint.find(Path(options.checkpoint).expanduser())
        self.trained = open_trained(found, options.weights)
        if self.trained.text is not None:
            raise ValueError(
                f"{found.folder} was trained with captions, but this page draws classes: python sample.py "
                "checkpoint=… prompt='…' draws captions, under the same guidance"
            )
        self._decoder = autoencoder.preview
        if options.decode:
            self._decoder = autoencoder.load_decoder(self.trained.latents, device, options.autoencoder)
        warm_up = Sampler(steps=2, batch_size=1, precision=self.precision)  # a first call is slower than the others
        self._draw(self.trained, None, (0,), (0,), warm_up)
        self._drawn.clear()

    @property
    def title(self) -> str:
        found = self.trained.found
        return f"{found.info['config'].get('name', found.folder.parent.name)}, step {found.step:,}"

    @property
    def about(self) -> str:
        """What is drawn from, in a line."""
        network = self._model(self.trained, NO_GUIDANCE).network
        model = self.trained.cfg.model
        routes = [str(route) for route in check_routes(model.routes, model.depth)]
        facts = [
            f"{self.trained.weights} weights of {_told(self.trained.found.folder)}",
            f"{sum(one.numel() for one in network.parameters()):,} parameters",
            f"{network.num_tokens} tokens",
            f"trained with {', '.join(routes)}" if routes else "trained without a route",
            f"{self.trained.cfg.objective} objective",
            f"{device_name(self.device)}, {self.precision}",
        ]
        return "; ".join(facts)

    @property
    def class_names(self) -> dict[str, int]:
        """What people call each label; "no class" is there if the network was trained without, too."""
        names = {str(n) if name == str(n) else f"{n} {name}": n for n, name in enumerate(self.trained.latents.classes)}
        return names | ({"no class": len(names)} if self.trained.label_drop else {})

    @property
    def others(self) -> list[str]:
        """The run's other checkpoints, for the weak network."""
        own = self.trained.found.folder
        return [_told(path.parent) for path in sorted(own.parent.glob("step_*/info.json")) if path.parent != own]

    def draw(self, side: Side, labels: Sequence[int], seeds: str) -> Shown:
        """Draw what a side asks for.

        labels  of the rows, as `class_names` has them.
        seeds   of the columns: "0-7", "3" or "1, 4, 9".

        Raises ValueError or OSError, also if a checkpoint has gone or changed since the page was opened.
        """
        guidance = side.guidance()
        trained = open_trained(checkpoint.find(self.trained.found.folder), self.options.weights)
        weaker = open_weak(guidance, trained)
        numbers, columns = trained.cfg.dataset.num_classes, _read_seeds(seeds)
        classes = [None if label == numbers else label for label in labels]
        rows = class_labels(classes, numbers, trained.label_drop)
        count = len(rows) * len(columns)
        if not 0 < count <= PICTURES_UP_TO:
            raise ValueError(
                f"{len(rows)} classes and {len(columns)} seeds are {count} pictures, but a side shows 1 to "
                f"{PICTURES_UP_TO}; sample.py draws any number"
            )
        check("steps", side.steps, Count | None)
        check("solver", side.solver, Solver | None)
        batch_size = min(self.options.batch_size, count)
        sampler = Sampler.of(trained.process, side.steps, side.solver, batch_size, self.precision, guidance)
        outlines = [one and one.outline(guidance) for one in (trained, weaker)]
        check_ratios(sampler, *outlines)
        cost, plain = relative_cost(sampler, *outlines), replace(sampler, guidance=NO_GUIDANCE)
        each = tuple(columns * len(rows)), tuple(row for row in rows for _ in columns)
        with self._lock:
            pictures, seconds = self._draw(trained, weaker, *each, sampler)
            unguided = seconds if guidance == NO_GUIDANCE else self._draw(trained, None, *each, plain)[1]
        told = f"{guidance.describe()}: " if guidance.kind != "none" else "no guidance: "
        if guidance.kind != "none":
            told += f"{cost:.2f} times the FLOPs and {seconds / unguided:.2f} times the time of no guidance; "
        told += f"{seconds:.2f} s for {count} pictures; {sampler.steps} steps of {sampler.solver}, "
        told += f"NFE {sampler.nfe(trained.process)}"
        grid = SampleFiles(None, False, columns, rows, trained.latents.classes).grid(pictures)
        return Shown(grid, told, self._command(trained, weaker, classes, columns, sampler))

    def _draw(
        self,
        trained: Trained,
        weaker: Trained | None,
        seeds: tuple[int, ...],
        labels: tuple[int, ...],
        sampler: Sampler,
    ) -> tuple[np.ndarray, float]:
        """Pictures (n, 1 or 3, H, W) uint8, and the seconds that they took."""
        key = (trained.sha256, weaker and weaker.sha256, seeds, labels, sampler)
        if key not in self._drawn:
            model = self._model(trained, sampler.guidance)
            weak = weaker and self._model(weaker, sampler.guidance)
            start = time.perf_counter()
            stream = draw_pictures(model, self._decoder, seeds, torch.tensor(labels), sampler, weak, check=True)
            pictures = np.concatenate([part.numpy() for part in stream])
            _keep(self._drawn, key, (pictures, time.perf_counter() - start), GRIDS)
        return self._drawn[key]

    def _model(self, trained: Trained, guidance: Guidance) -> Model:
        key = (trained.found.folder, trained.sha256)
        if key not in self._networks:
            _keep(self._networks, key, trained.load(self.device), NETWORKS)
        return replace(self._networks[key], routes=trained.routes(guidance))

    def _command(
        self,
        trained: Trained,
        weaker: Trained | None,
        classes: Sequence[int | None],
        seeds: Sequence[int],
        sampler: Sampler,
    ) -> str:
        """The command line that draws the same pictures from this folder: what differs from sample.py's defaults."""
        guidance, options = sampler.guidance, self.options
        in_a_row = len(seeds) > 1 and list(seeds) == list(range(seeds[0], seeds[-1] + 1))
        given: dict[str, object] = {
            "checkpoint": _quoted(_told(trained.found.folder)),
            "classes": classes,
            "seeds": f"{seeds[0]}-{seeds[-1]}" if in_a_row else seeds[0] if len(seeds) == 1 else seeds,
            "steps": sampler.steps,
            "solver": sampler.solver,
        }
        given |= {name: getattr(options, name) for name in DEFAULTS if getattr(options, name) != DEFAULTS[name]}
        if options.autoencoder is not None:
            given["autoencoder"] = _quoted(options.autoencoder)
        given["guidance"] = guidance.kind
        shown = controls(guidance.kind)
        given |= {f"guidance.{name}": getattr(guidance, name) for name in ("scale", "strong", "weak") if shown[name]}
        if guidance.interval is not None:
            given["guidance.interval"] = guidance.interval
        if weaker is not None:
            given["guidance.checkpoint"] = _quoted(_told(weaker.found.folder))
        given |= {f"guidance.{name}": True for name in ("same_ids", "force") if getattr(guidance, name)}
        words = [f"{key}={written(value)}" for key, value in given.items()]
        return shlex.join(["python", self.sample_door, *words])


def _read_seeds(text: str) -> list[int]:
    """Raises ValueError as sample.py does, and for more than are shown, of which a list would be long."""
    text = text.strip()
    if (ends := re.fullmatch(r"(\d+)-(\d+)", text)) and int(ends[2]) - int(ends[1]) >= PICTURES_UP_TO:
        raise ValueError(
            f"seeds are {text}, but a side shows at most {PICTURES_UP_TO} pictures; sample.py draws any number"
        )
    if re.fullmatch(r"\d+( *,? +\d+|,\d+)*", text):
        return [int(number) for number in re.findall(r"\d+", text)]
    return parse_seeds(text)


def _read_interval(text: str) -> tuple[float, ...]:
    """Raises ValueError for what is no numbers; how many they are is the guidance's matter."""
    try:
        ends = tuple(float(word) for word in text.strip(" []").split(","))
    except ValueError as error:
        raise ValueError(
            f"guidance.interval is {text!r}, but must be the lowest and the highest noise level, such as 0.3, 5"
        ) from error
    check("guidance.interval", ends, tuple[float, ...])
    return ends


def _keep(kept: dict, key: object, value: object, count: int) -> None:
    """Store the newest value, and let the oldest go beyond so many."""
    while len(kept) >= count:
        kept.pop(next(iter(kept)))
    kept[key] = value


def _told(folder: Path) -> str:
    """A folder as people name it here: from the working folder, if it lies below."""
    here = Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)


def _quoted(text: str) -> str:
    """Text as Hydra reads it as such."""
    plain = re.fullmatch(r"[A-Za-z~./][\w./~-]*", text, re.ASCII) and text.lower() not in ("null", "true", "false")
    return text if plain else "'" + text.replace("'", r"\'") + "'"
