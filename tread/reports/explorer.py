"""Guidance by hand: a page of two sides with the same classes and seeds, on this machine alone, without a network.

The controls of a side become pictures, what they cost, and sample.py's command for them. Drawing is sample.py's: the
same functions, in the same order. This file alone knows gradio.
"""

from __future__ import annotations

import html
import logging
import os
import re
import shlex
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from errno import EADDRINUSE
from pathlib import Path
from types import ModuleType
from typing import Annotated, get_args

import numpy as np
import torch
from PIL import Image

from routing_module import check_routes
from tread.checkpoints import checkpoint
from tread.checkpoints.for_sampling import SavedNetwork, open_network, open_weak
from tread.diffusion.guidance import KINDS, NO_GUIDANCE, Guidance
from tread.diffusion.labels import class_labels, spread_classes
from tread.diffusion.sampling import Model, Sampler, check_ratios, draw_pictures, relative_cost
from tread.diffusion.solvers import Solver
from tread.encoders import autoencoder
from tread.evaluation.sample_files import SampleFiles, parse_seeds
from tread.runtime.device import Precision, device_name, use_precision
from tread.runtime.schema import Count, Range, check, written
from tread.runtime.tensor_files import Weights

PICTURES_UP_TO = 256  # a side
DEFAULTS = {"batch_size": 64, "precision": "auto", "cpu_threads": None, "weights": "ema", "decode": True}  # sample.py's
NETWORKS, GRIDS = 4, 16  # that are kept, so that what was loaded or drawn already takes no time
HOST = "127.0.0.1"
NEEDED = 6  # the first version of gradio that this is written for
SAME = "none: the same network"
DAY = (86400, 86400)  # seconds: how often pictures that the page showed are looked through, and how long they are kept
STYLE = """
.told {margin: 0; line-height: 1.5; min-height: 4.5em}
.refused {color: #b91c1c; font-weight: 600}
.dark .refused {color: #f87171}
.grid img {width: 100%; height: 100%; object-fit: contain; padding-top: 30px}
.command textarea {font-family: var(--font-mono); font-size: 0.85em}
"""


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

    def __init__(self, options: ExplorerOptions, device: torch.device, sample_door: str) -> None:
        self.options, self.device, self.sample_door = options, device, sample_door
        self.precision = use_precision(options.precision, device)
        self._lock, self._networks, self._drawn = threading.Lock(), {}, {}
        source = checkpoint.find(Path(options.checkpoint).expanduser())
        self.saved = open_network(source, options.weights)
        if self.saved.text is not None:
            raise ValueError(
                f"{source.folder} was trained with captions, but this page draws classes: python sample.py "
                "checkpoint=… prompt='…' draws captions, under the same guidance"
            )
        self._decoder = autoencoder.preview
        if options.decode:
            self._decoder = autoencoder.load_decoder(self.saved.latents, device, options.autoencoder)
        warm_up = Sampler(steps=2, batch_size=1, precision=self.precision)  # a first call is slower than the others
        self._draw(self.saved, None, (0,), (0,), warm_up)
        self._drawn.clear()

    @property
    def title(self) -> str:
        source = self.saved.found
        return f"{source.info['config'].get('name', source.folder.parent.name)}, step {source.step:,}"

    @property
    def about(self) -> str:
        """What is drawn from, in a line."""
        network = self._model(self.saved, NO_GUIDANCE).network
        model = self.saved.cfg.model
        routes = [str(route) for route in check_routes(model.routes, model.depth)]
        facts = [
            f"{self.saved.weights} weights of {_told(self.saved.found.folder)}",
            f"{sum(parameter.numel() for parameter in network.parameters()):,} parameters",
            f"{network.num_tokens} tokens",
            f"trained with {', '.join(routes)}" if routes else "trained without a route",
            f"{self.saved.cfg.objective} objective",
            f"{device_name(self.device)}, {self.precision}",
        ]
        return "; ".join(facts)

    @property
    def class_names(self) -> dict[str, int]:
        """What people call each label; "no class" is there if the network was trained without, too."""
        names = {str(n) if name == str(n) else f"{n} {name}": n for n, name in enumerate(self.saved.latents.classes)}
        return names | ({"no class": len(names)} if self.saved.label_drop else {})

    @property
    def others(self) -> list[str]:
        """The run's other checkpoints, for the weak network."""
        here = self.saved.found.folder
        return [_told(path.parent) for path in sorted(here.parent.glob("step_*/info.json")) if path.parent != here]

    def draw(self, side: Side, labels: Sequence[int], seeds: str) -> Shown:
        """Draw what a side asks for.

        labels  of the rows, as `class_names` has them.
        seeds   of the columns: "0-7", "3" or "1, 4, 9".

        Raises ValueError or OSError, also if a checkpoint has gone or changed since the page was opened.
        """
        guidance = side.guidance()
        saved = open_network(checkpoint.find(self.saved.found.folder), self.options.weights)
        weaker = open_weak(guidance, saved)
        numbers, columns = saved.cfg.dataset.num_classes, _read_seeds(seeds)
        classes = [None if label == numbers else label for label in labels]
        rows = class_labels(classes, numbers, saved.label_drop)
        count = len(rows) * len(columns)
        if not 0 < count <= PICTURES_UP_TO:
            raise ValueError(
                f"{len(rows)} classes and {len(columns)} seeds are {count} pictures, but a side shows 1 to "
                f"{PICTURES_UP_TO}; sample.py draws any number"
            )
        check("steps", side.steps, Count | None)
        check("solver", side.solver, Solver | None)
        batch_size = min(self.options.batch_size, count)
        sampler = Sampler.of(saved.process, side.steps, side.solver, batch_size, self.precision, guidance)
        outlines = [network and network.without_weights(guidance) for network in (saved, weaker)]
        check_ratios(sampler, *outlines)
        cost, plain = relative_cost(sampler, *outlines), replace(sampler, guidance=NO_GUIDANCE)
        each = tuple(columns * len(rows)), tuple(row for row in rows for _ in columns)
        with self._lock:
            pictures, seconds = self._draw(saved, weaker, *each, sampler)
            unguided = seconds if guidance == NO_GUIDANCE else self._draw(saved, None, *each, plain)[1]
        told = f"{guidance.describe()}: " if guidance.kind != "none" else "no guidance: "
        if guidance.kind != "none":
            told += f"{cost:.2f} times the FLOPs and {seconds / unguided:.2f} times the time of no guidance; "
        told += f"{seconds:.2f} s for {count} pictures; {sampler.steps} steps of {sampler.solver}, "
        told += f"NFE {sampler.nfe(saved.process)}"
        grid = SampleFiles(None, False, columns, rows, saved.latents.classes).grid(pictures)
        return Shown(grid, told, self._command(saved, weaker, classes, columns, sampler))

    def _draw(
        self,
        saved: SavedNetwork,
        weaker: SavedNetwork | None,
        seeds: tuple[int, ...],
        labels: tuple[int, ...],
        sampler: Sampler,
    ) -> tuple[np.ndarray, float]:
        """Pictures (n, 1 or 3, H, W) uint8, and the seconds that they took."""
        key = (saved.sha256, weaker and weaker.sha256, seeds, labels, sampler)
        if key not in self._drawn:
            model = self._model(saved, sampler.guidance)
            weak = weaker and self._model(weaker, sampler.guidance)
            start = time.perf_counter()
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
        self,
        saved: SavedNetwork,
        weaker: SavedNetwork | None,
        classes: Sequence[int | None],
        seeds: Sequence[int],
        sampler: Sampler,
    ) -> str:
        """The command line that draws the same pictures from this folder: what differs from sample.py's defaults."""
        guidance, options = sampler.guidance, self.options
        in_a_row = len(seeds) > 1 and list(seeds) == list(range(seeds[0], seeds[-1] + 1))
        given: dict[str, object] = {
            "checkpoint": _quoted(_told(saved.found.folder)),
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


def import_gradio() -> ModuleType:
    """gradio, with its analytics off. Raises ValueError where it is not installed, or too old."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    how = f"the page needs gradio, version {NEEDED} or later: pip install -r requirements-explore.txt"
    try:
        import gradio  # imported here because it takes seconds, and is an extra
    except ImportError as error:
        raise ValueError(how) from error
    if int(gradio.__version__.partition(".")[0]) < NEEDED:
        raise ValueError(f"{how}; here is {gradio.__version__}")
    return gradio


def check_port(port: int) -> None:
    """Raise OSError unless a page can be served there."""
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            free.bind((HOST, port))
        except OSError as error:
            taken = error.errno == EADDRINUSE
            why = "is taken, maybe by another page" if taken else f"can't be used ({error.strerror})"
            raise OSError(f"port {port} of {HOST} {why}: port={port + 1} or any other that is free") from error


def serve(explorer: Explorer, port: int, ready: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C.

    ready  is called with its address once it is there.
    """
    gradio = import_gradio()
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(filter(None, (os.environ.get("no_proxy"), HOST)))
    logging.getLogger("httpx").setLevel(logging.WARNING)  # by which gradio asks itself whether it is there
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    theme = gradio.themes.Default(**fonts).set(block_info_text_color="*neutral_500")
    with tempfile.TemporaryDirectory(prefix="tread-explore-") as pictures:
        os.environ["GRADIO_TEMP_DIR"] = pictures
        page = _build(gradio, explorer)
        try:
            alone = {"share": False, "ssr_mode": False, "mcp_server": False, "enable_monitoring": False}
            look = {"theme": theme, "css": STYLE, "footer_links": [], "quiet": True}
            page.launch(server_name=HOST, server_port=port, prevent_thread_lock=True, **alone, **look)
            ready(f"http://{HOST}:{port}")
            threading.Event().wait()
        finally:
            page.close(verbose=False)


def _build(gr: ModuleType, explorer: Explorer):
    with gr.Blocks(title=f"{explorer.title}: guidance by hand", analytics_enabled=False, delete_cache=DAY) as page:
        gr.Markdown(f"### Guidance by hand: {explorer.title}\n{explorer.about}")
        with gr.Row():
            first = spread_classes(len(explorer.saved.latents.classes), 4)
            look = {"label": "classes, a row each", "scale": 2, "elem_id": "classes"}
            classes = gr.Dropdown([*explorer.class_names.items()], value=first, multiselect=True, **look)
            seeds = gr.Textbox("0-5", label="seeds, a column each: 0-5, or 1, 4, 9", elem_id="seeds")
        with gr.Row():
            guided = "cfg" if explorer.saved.label_drop else "sparse"
            sides = [_controls(gr, explorer, "A", "none"), _controls(gr, explorer, "B", guided)]
        button = gr.Button("Draw A and B", variant="primary")
        with gr.Row():
            results = [_results(gr, name) for name in ("A", "B")]

        def draw(labels: list[int], seeds: str, *values) -> tuple[Image.Image | None, str, str]:
            """What a side shows: grid, what it is, and its command; or no grid, and the one line that says why."""
            try:
                shown = explorer.draw(Side(*values), labels, seeds)
            except (ValueError, OSError, torch.OutOfMemoryError) as error:
                line = " ".join(str(error).split())
                return None, f'<p class="told refused" role="alert">{html.escape(line)}</p>', ""
            return shown.grid, f'<p class="told">{html.escape(shown.told)}</p>', shown.command

        one_at_a_time = {"concurrency_id": "draw", "concurrency_limit": 1, "api_visibility": "private"}
        for start in (button.click, seeds.submit):
            then = start
            for side, result in zip(sides, results):
                then = then(draw, [classes, seeds, *side], result, **one_at_a_time).then
    return page


def _results(gr: ModuleType, name: str) -> list:
    with gr.Column():
        told = gr.HTML('<p class="told">Not drawn yet.</p>', elem_id=f"told-{name}")
        look = {"height": 400, "buttons": ["download", "fullscreen"], "elem_id": f"grid-{name}", "elem_classes": "grid"}
        grid = gr.Image(label=name, format="png", type="pil", **look)
        said = {"label": f"the command that draws {name}", "elem_id": f"command-{name}", "elem_classes": "command"}
        command = gr.Textbox(lines=2, interactive=False, buttons=["copy"], **said)
    return [grid, told, command]


def _controls(gr: ModuleType, explorer: Explorer, name: str, kind: str) -> list:
    """The controls of one side, in the order of the fields of Side; those without an effect for its kind are hidden."""
    process, shown, start, widgets = explorer.saved.process, controls(kind), Side(kind), {}
    levels = process.schedule(process.default_steps)[:-1].tolist()

    def place(of: str, **more) -> dict:
        return {"visible": shown.get(of, True), "elem_id": f"{of}-{name}", **more}

    def slider(of: str, most: float, label: str, info: str, **more) -> None:
        value = getattr(start, of)
        widgets[of] = gr.Slider(0, most, value=value, step=0.05, label=label, info=info, **place(of, **more))

    with gr.Column(), gr.Group():
        with gr.Row():
            widgets["kind"] = gr.Dropdown(
                list(KINDS), value=kind, label=f"{name}: guidance", info=branches(kind), **place("kind", scale=3)
            )
            small, solvers = {"scale": 1, "min_width": 90}, list(get_args(Solver))
            steps = process.default_steps
            widgets["steps"] = gr.Number(steps, label="steps", precision=0, **place("steps", **small))
            solver = process.default_solver
            widgets["solver"] = gr.Dropdown(solvers, value=solver, label="solver", **place("solver", **small))
        with gr.Row():
            slider("scale", 10, "scale ω", "D_weak + ω·(D_strong − D_weak); 1: the strong branch alone", scale=3)
            widgets["interval"] = gr.Textbox(
                label=f"guided {process.level_name}: from, to",
                info="empty: everywhere",
                placeholder=f"{levels[-1]:.3g}, {levels[0]:.3g}",
                max_lines=1,
                **place("interval", scale=2, min_width=120),
            )
        with gr.Row():
            slider("strong", 0.95, "strong ratio", "tokens routed around, strong branch")
            slider("weak", 0.95, "weak ratio", "tokens routed around, weak branch")
        with gr.Row():
            widgets["checkpoint"] = gr.Dropdown(
                [(SAME, ""), *((other, other) for other in explorer.others)],
                value="",
                label="second checkpoint, the weak branch's",
                info="one of this run, or any path that you type",
                allow_custom_value=True,
                **place("checkpoint", scale=3),
            )
            with gr.Column(scale=2, min_width=120):
                widgets["same_ids"] = gr.Checkbox(label="both route the same tokens", **place("same_ids"))
                widgets["force"] = gr.Checkbox(label="force likely mistakes", **place("force"))

    def choose(kind: str) -> list:
        return [gr.update(info=branches(kind)), *(gr.update(visible=visible) for visible in controls(kind).values())]

    outputs = [widgets[of] for of in ("kind", *shown)]
    widgets["kind"].input(choose, widgets["kind"], outputs, api_visibility="private", show_progress="hidden")
    return [widgets[item.name] for item in fields(Side)]
