"""Guidance by hand: a page with two sides of the same classes and seeds, served to this machine alone.

A side's settings become pictures, their cost, and the sample.py command that draws them. Drawing is sample.py's: the
same functions in the same order. The page is a plain HTML form without scripts; its address holds the settings.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args
from urllib.parse import parse_qs, urlsplit

import numpy as np
import torch
from PIL import Image

from routing_module import check_routes
from tread.checkpoints import checkpoint
from tread.checkpoints.for_sampling import SavedNetwork, open_network, open_weak
from tread.diffusion.guidance import KINDS, NO_GUIDANCE, Guidance
from tread.diffusion.labels import class_labels, spread_classes
from tread.diffusion.sampling import Model, Sampler, draw_pictures, relative_cost
from tread.diffusion.solvers import Solver
from tread.encoders import autoencoder
from tread.evaluation.sample_files import SampleFiles, describe_drawing, parse_seeds
from tread.reports.page import escape, filled, picture_uri
from tread.runtime import schema
from tread.runtime.device import Precision, device_name, use_precision
from tread.runtime.schema import Count, Range, check, written
from tread.runtime.tensor_files import Weights

PICTURES_UP_TO = 256  # a side
DEFAULTS = {"batch_size": 64, "precision": "auto", "cpu_threads": None, "weights": "ema", "decode": True}
DEFAULTS["autoencoder"] = None  # all of them sample.py's
NETWORKS, GRIDS = 4, 16  # kept in memory, so that nothing is loaded or drawn twice
HOST = "127.0.0.1"
NUMBER, RATIO = 'type="number" step="any"', 'type="number" step="0.05" min="0" max="0.95"'
FIELDS = {  # a setting of a side → its label, its first value, attributes of its input
    "steps": ("steps", "", 'type="number" min="1"'),
    "scale": ("scale ω (1: the strong branch alone)", "1.5", NUMBER),
    "interval": ("guided noise levels: from, to (empty: all)", "", ""),
    "strong": ("fraction of skipped tokens, strong branch", "0.3", RATIO),
    "weak": ("fraction of skipped tokens, weak branch", "0.7", RATIO),
    "checkpoint": ("second checkpoint (empty: the same network)", "", 'list="checkpoints"'),
}
BOXES = {"same_ids": "both skip the same tokens", "force": "force likely mistakes"}


@dataclass(frozen=True)
class ExplorerOptions:
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
    """Whether each setting of a side has an effect for a kind of guidance."""
    row = KINDS[kind]
    guided = dict.fromkeys(("scale", "interval"), row.weak_class is not None)
    routed = dict.fromkeys(("strong", "weak", "same_ids", "force"), row.routed)
    return guided | routed | {"checkpoint": row.weak_network != "never"}


def branches(kind: str) -> str:
    """The two branches of a kind and what they see, for people."""
    row = KINDS[kind]
    if row.weak_class is None:
        return "one pass a call: the class, all tokens"
    classes = ["class" if sees_class else "no class" for sees_class in (row.strong_class, row.weak_class)]
    strong, weak = (text + ", routed" * row.routed for text in classes)
    weak += ", without the sparse part of a SPRINT" * row.drops_path
    weak += {"never": "", "may": ", or a second network", "must": ", a second, weaker network"}[row.weak_network]
    return f"strong branch: {strong}; weak branch: {weak}"


@dataclass(frozen=True)
class Side:
    """The settings of a side. steps, solver: None takes the process's own."""

    guidance: Guidance = NO_GUIDANCE
    steps: Count | None = None
    solver: Solver | None = None


def read_side(form: Mapping[str, str]) -> Side:
    """A side from its form; settings without an effect for its kind are ignored. Raises ValueError for bad ones."""

    def number(name: str, text: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"{name} is {text!r}, but must be a number") from None

    check("guidance.kind", form["kind"], Literal[tuple(KINDS)])
    form = {name: text.strip() for name, text in form.items() if controls(form["kind"]).get(name, True)}
    given: dict[str, object] = {name: number(name, form[name]) for name in ("scale", "strong", "weak") if name in form}
    if interval := form.get("interval", "").strip("[]"):
        given["interval"] = [number("interval", end) for end in interval.split(",")]
    given |= {"checkpoint": form.get("checkpoint") or None, **{name: name in form for name in BOXES}}
    steps = int(form["steps"]) if form.get("steps", "").isdecimal() else form.get("steps") or None
    whole = {"guidance": {"kind": form["kind"], **given}, "steps": steps, "solver": form.get("solver") or None}
    return schema.read(whole, Side)


class Shown(NamedTuple):
    """The result of a side: a grid as sample.py draws it, its facts and cost, and the command that draws it again."""

    grid: Image.Image
    told: str
    command: str


class Explorer:
    """A checkpoint that is drawn from again and again. Networks and pictures are kept; one drawing at a time.

    sample_script  the path of sample.py in the commands that are shown.

    Raises ValueError or OSError for a checkpoint or an autoencoder that can't be used.
    """

    def __init__(self, options: ExplorerOptions, device: torch.device, sample_script: str) -> None:
        self.options, self.device, self.sample_script = options, device, sample_script
        self.precision = use_precision(options.precision, device)
        self._lock, self._networks, self._drawn = threading.Lock(), {}, {}
        self.saved = open_network(checkpoint.find(Path(options.checkpoint).expanduser()), options.weights)
        self.folder = self.saved.found.folder
        if self.saved.text is not None:
            raise ValueError(
                f"{self.folder} was trained with captions, but this page draws classes: python sample.py "
                "checkpoint=… prompt='…' draws captions, under the same guidance"
            )
        self._decoder = autoencoder.preview
        if options.decode:
            self._decoder = autoencoder.load_decoder(self.saved.latents, device, options.autoencoder)
        warm_up = Sampler(steps=2, batch_size=1, precision=self.precision)  # the first call is slower than the others
        self._draw((self.saved, None), ((0, 0),), warm_up)
        self._drawn.clear()

    @property
    def title(self) -> str:
        name = self.saved.found.info["config"].get("name", self.folder.parent.name)
        return f"{name}, step {self.saved.found.step:,}"

    @property
    def about(self) -> str:
        """The network in a line."""
        network, model = self._model(self.saved, NO_GUIDANCE).network, self.saved.cfg.model
        parameters = sum(parameter.numel() for parameter in network.parameters())
        routes = ", ".join(map(str, check_routes(model.routes, model.depth))) or "no route"
        return (
            f"{self.saved.weights} weights of {_path_text(self.folder)}; {parameters:,} parameters; "
            f"{network.num_tokens} tokens; trained with {routes}; {self.saved.cfg.objective} objective; "
            f"{device_name(self.device)}, {self.precision}"
        )

    @property
    def class_names(self) -> dict[str, int]:
        """Names of the labels; "no class" is one if the network was also trained without classes."""
        names = {str(n) if name == str(n) else f"{n} {name}": n for n, name in enumerate(self.saved.latents.classes)}
        return names | ({"no class": len(names)} if self.saved.label_drop else {})

    @property
    def others(self) -> list[str]:
        """The run's other checkpoints, for the weak network."""
        folders = sorted(path.parent for path in self.folder.parent.glob("step_*/info.json"))
        return [_path_text(folder) for folder in folders if folder != self.folder]

    def draw(self, side: Side, labels: Sequence[int], seeds: str) -> Shown:
        """Draw a side.

        labels  of the rows, as in `class_names`.
        seeds   of the columns: "0-7", "3" or "1, 4, 9".

        Raises ValueError or OSError, also if a checkpoint has gone or changed since the page was opened.
        """
        saved, guidance = open_network(checkpoint.find(self.folder), self.options.weights), side.guidance
        networks, columns = (saved, open_weak(guidance, saved)), _read_seeds(seeds)
        known = saved.cfg.dataset.num_classes
        classes = [None if label == known else label for label in labels]
        rows = class_labels(classes, known, saved.label_drop)
        count = len(rows) * len(columns)
        if not 0 < count <= PICTURES_UP_TO:
            raise ValueError(
                f"{len(rows)} classes and {len(columns)} seeds are {count} pictures, but a side shows 1 to "
                f"{PICTURES_UP_TO}; sample.py draws any number"
            )
        batch_size = min(self.options.batch_size, count)
        sampler = Sampler.of(saved.process, side.steps, side.solver, batch_size, self.precision, guidance)
        outlines = [network and network.without_weights(guidance) for network in networks]
        files = SampleFiles(None, False, columns, rows, saved.latents.classes)
        with self._lock:
            pictures, seconds = self._draw(networks, files.pairs, sampler)
            unguided = self._draw((saved, None), files.pairs, replace(sampler, guidance=NO_GUIDANCE))[1]
        told = describe_drawing(saved, sampler, relative_cost(sampler, *outlines))
        told += f"; {seconds:.2f} s for {count} pictures"
        told += "" if guidance == NO_GUIDANCE else f", {seconds / unguided:.2f} times that of no guidance"
        return Shown(files.grid(pictures), told, self._command(networks[1], classes, columns, sampler))

    def _draw(
        self, networks: Sequence[SavedNetwork | None], pairs: Sequence[tuple[int, int]], sampler: Sampler
    ) -> tuple[np.ndarray, float]:
        """Pictures (n, 1 or 3, H, W) uint8 of (label, seed), and the seconds that they took."""
        key = (*(network and network.sha256 for network in networks), *pairs, sampler)
        if key not in self._drawn:
            model, weak = (network and self._model(network, sampler.guidance) for network in networks)
            (labels, seeds), start = zip(*pairs), time.perf_counter()
            stream = draw_pictures(model, self._decoder, seeds, torch.tensor(labels), sampler, weak, check=True)
            pictures = np.concatenate([part.numpy() for part in stream])
            _keep(self._drawn, key, (pictures, time.perf_counter() - start), GRIDS)
        return self._drawn[key]

    def _model(self, saved: SavedNetwork, guidance: Guidance) -> Model:
        key = (saved.found.folder, saved.sha256)
        if key not in self._networks:
            _keep(self._networks, key, saved.load(self.device), NETWORKS)
        return replace(self._networks[key], routes=saved.routes(guidance))

    def _command(
        self, weaker: SavedNetwork | None, classes: Sequence[int | None], seeds: Sequence[int], sampler: Sampler
    ) -> str:
        """The sample.py command that draws the same pictures from the working folder; defaults are left out."""
        guidance, options = asdict(sampler.guidance), vars(self.options)
        given = {
            "checkpoint": _path_text(self.folder),
            "classes": classes,
            "seeds": f"{seeds[0]}-{seeds[-1]}" if isinstance(seeds, range) else seeds,
            "steps": sampler.steps,
            "solver": sampler.solver,
            **{name: options[name] for name in DEFAULTS if options[name] != DEFAULTS[name]},
            "guidance": guidance["kind"],
            **{f"guidance.{name}": guidance[name] for name, shown in controls(guidance["kind"]).items() if shown},
            "guidance.checkpoint": weaker and _path_text(weaker.found.folder),
        }
        words = [f"{key}={_spelt(value)}" for key, value in given.items() if value is not None]
        return shlex.join(["python", self.sample_script, *words])


def _read_seeds(text: str) -> Sequence[int]:
    """Seeds as sample.py reads them, and lists without brackets."""
    words = text.replace(",", " ").split()
    return [int(word) for word in words] if words and all(map(str.isdecimal, words)) else parse_seeds(text.strip())


def _keep(kept: dict, key: object, value: object, count: int) -> None:
    """Store a value, and forget the oldest ones so that at most `count` stay."""
    while len(kept) >= count:
        kept.pop(next(iter(kept)))
    kept[key] = value


def _path_text(folder: Path) -> str:
    """A folder's path, from the working folder if it lies below."""
    here = Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)


def _spelt(value: object) -> str:
    """A value as Hydra reads it: text in quotes unless it is plain."""
    plain = re.compile(r"(?!(null|true|false)$)[a-z~./][\w./~-]*|\d+-\d+", re.ASCII | re.IGNORECASE)
    if not isinstance(value, str) or plain.fullmatch(value):
        return written(value)
    return "'" + value.replace("'", r"\'") + "'"


def page(explorer: Explorer, query: Mapping[str, list[str]]) -> Iterator[str]:
    """The page in parts: the form as it was sent, then each side as soon as it is drawn.

    query  of the address; {}: the form is new, and nothing is drawn.
    """
    saved, names = explorer.saved, explorer.class_names
    classes = query.get("classes", []) if query else spread_classes(len(saved.latents.classes), 4)
    chosen, seeds = {*map(str, classes)}, query.get("seeds", ["0-5"])[0]
    values = {name: value for name, (_, value, _) in FIELDS.items()}
    values |= {"steps": str(saved.process.default_steps), "solver": saved.process.default_solver}
    sides = {"A": values | {"kind": "none"}, "B": values | {"kind": "cfg" if saved.label_drop else "sparse"}}
    for key, (value, *_) in query.items():
        name, _, side = key.rpartition("-")
        sides.get(side, {})[name] = value
    parts = {
        "title": escape(explorer.title),
        "about": escape(explorer.about),
        "hidden": "".join(
            f"fieldset:has([value={kind}]:checked) .{name} {{ display: none; }}\n"
            for kind in KINDS
            for name, effect in (controls(kind) | {f"about-{other}": other == kind for other in KINDS}).items()
            if not effect
        ),
        "classes": "".join(_box("classes", name, str(label), str(label) in chosen) for name, label in names.items()),
        "seeds": escape(seeds),
        "sides": "".join(_side_form(side, form) for side, form in sides.items()),
        "others": "".join(f"<option>{escape(other)}</option>" for other in explorer.others),
    }
    yield filled("explorer.html", parts)
    for side, form in sides.items() if query else ():
        try:
            shown, png = explorer.draw(read_side(form), [int(label) for label in classes], seeds), io.BytesIO()
            shown.grid.save(png, "PNG")
            picture = f'<img alt="samples of {side}" src="{picture_uri("png", png.getvalue())}">'
            content = f"<p>{escape(shown.told)}</p>{picture}<pre>{escape(shown.command)}</pre>"
        except (ValueError, OSError, torch.OutOfMemoryError) as error:
            content = f'<p class="refused" role="alert">{escape(error)}</p>'
        yield f'<section id="{side}">{content}</section>'
    yield "</div></body></html>\n"


def _side_form(side: str, form: Mapping[str, str]) -> str:
    """The settings of one side; the style hides those without an effect for the chosen kind."""
    parts = []
    for name, choices in (("kind", KINDS), ("solver", get_args(Solver))):
        options = "".join(f'<option value="{v}"{" selected" * (v == form[name])}>{v}</option>' for v in choices)
        parts.append(f'<label>{name} <select name="{name}-{side}">{options}</select></label>')
    parts += [f'<p class="about-{kind}">{branches(kind)}</p>' for kind in KINDS]
    for name, (label, _, kind) in FIELDS.items():
        entry = f'<input name="{name}-{side}" value="{escape(form[name])}" {kind}>'
        parts.append(f'<label class="{name}">{label} {entry}</label>')
    parts += [_box(f"{name}-{side}", label, "on", name in form) for name, label in BOXES.items()]
    return f"<fieldset><legend>{side}</legend>{''.join(parts)}</fieldset>"


def _box(name: str, label: str, value: str, checked: bool) -> str:
    entry = f'<input type="checkbox" name="{name}" value="{value}"{" checked" * checked}>'
    return f'<label class="{name.partition("-")[0]}">{entry} {escape(label)}</label>'


class PageHandler(BaseHTTPRequestHandler):
    """Answers with the page of `server.explorer` where a request names this machine itself.

    Under a name of its own a web page from elsewhere could read along.
    """

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        if urlsplit(f"//{self.headers['Host']}").hostname not in (HOST, "localhost") or address.path != "/":
            return self.send_error(404)
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # whoever asked may have gone
            for part in page(self.server.explorer, parse_qs(address.query, keep_blank_values=True)):
                self.wfile.write(part.encode())

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""
