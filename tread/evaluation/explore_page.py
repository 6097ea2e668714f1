"""The page of scripts/explore.py: two sides with the same classes and seeds, on this machine alone, without a network.

What its controls mean and do is explore.py's; this file alone knows gradio.
"""

from __future__ import annotations

import html
import logging
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from dataclasses import fields
from errno import EADDRINUSE
from types import ModuleType
from typing import get_args

import torch
from PIL import Image

from tread.diffusion.guidance import KINDS
from tread.diffusion.sampling import spread_classes
from tread.diffusion.solvers import Solver
from tread.evaluation.explore import Explorer, Side, branches, controls

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
            why = (
                "is taken, maybe by another page" if error.errno == EADDRINUSE else f"can't be used ({error.strerror})"
            )
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
            page.launch(
                server_name=HOST,
                server_port=port,
                share=False,
                quiet=True,
                prevent_thread_lock=True,
                ssr_mode=False,
                mcp_server=False,
                enable_monitoring=False,
                footer_links=[],
                theme=theme,
                css=STYLE,
            )
            ready(f"http://{HOST}:{port}")
            threading.Event().wait()
        finally:
            page.close(verbose=False)


def _build(gr: ModuleType, explorer: Explorer):
    with gr.Blocks(title=f"{explorer.title}: guidance by hand", analytics_enabled=False, delete_cache=DAY) as page:
        gr.Markdown(f"### Guidance by hand: {explorer.title}\n{explorer.about}")
        with gr.Row():
            first = spread_classes(len(explorer.trained.latents.classes), 4)
            classes = gr.Dropdown(
                [*explorer.class_names.items()],
                value=first,
                multiselect=True,
                label="classes, a row each",
                scale=2,
                elem_id="classes",
            )
            seeds = gr.Textbox("0-5", label="seeds, a column each: 0-5, or 1, 4, 9", elem_id="seeds")
        with gr.Row():
            sides = [_controls(gr, explorer, "A", "none"), _controls(gr, explorer, "B", _guided(explorer))]
        button = gr.Button("Draw A and B", variant="primary")
        with gr.Row():
            results = [_results(gr, name) for name in ("A", "B")]

        def draw(labels: list[int], seeds: str, *values) -> tuple[Image.Image | None, str, str]:
            return _answer(explorer, Side(*values), labels, seeds)

        one_at_a_time = {"concurrency_id": "draw", "concurrency_limit": 1, "api_visibility": "private"}
        for start in (button.click, seeds.submit):
            then = start
            for side, result in zip(sides, results):
                then = then(draw, [classes, seeds, *side], result, **one_at_a_time).then
    return page


def _guided(explorer: Explorer) -> str:
    """The kind that side B starts with."""
    return "cfg" if explorer.trained.label_drop else "sparse"


def _answer(explorer: Explorer, side: Side, labels: list[int], seeds: str) -> tuple[Image.Image | None, str, str]:
    """What a side shows: grid, what it is, and its command; or no grid, and the one line that says why."""
    try:
        shown = explorer.draw(side, labels, seeds)
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        line = " ".join(str(error).split())
        return None, f'<p class="told refused" role="alert">{html.escape(line)}</p>', ""
    return shown.grid, f'<p class="told">{html.escape(shown.told)}</p>', shown.command


def _results(gr: ModuleType, name: str) -> list:
    with gr.Column():
        told = gr.HTML('<p class="told">Not drawn yet.</p>', elem_id=f"told-{name}")
        buttons = ["download", "fullscreen"]
        grid = gr.Image(
            label=name,
            format="png",
            type="pil",
            height=400,
            buttons=buttons,
            elem_id=f"grid-{name}",
            elem_classes="grid",
        )
        said = {"label": f"the command that draws {name}", "elem_id": f"command-{name}", "elem_classes": "command"}
        command = gr.Textbox(lines=2, interactive=False, buttons=["copy"], **said)
    return [grid, told, command]


def _controls(gr: ModuleType, explorer: Explorer, name: str, kind: str) -> list:
    """The controls of one side, in the order of the fields of Side; those without an effect for its kind are hidden."""
    process, shown, start, own = explorer.trained.process, controls(kind), Side(kind), {}
    levels = process.schedule(process.default_steps)[:-1].tolist()

    def place(of: str, **more) -> dict:
        return {"visible": shown.get(of, True), "elem_id": f"{of}-{name}", **more}

    def slider(of: str, most: float, label: str, info: str, **more) -> None:
        value = getattr(start, of)
        own[of] = gr.Slider(0, most, value=value, step=0.05, label=label, info=info, **place(of, **more))

    with gr.Column(), gr.Group():
        with gr.Row():
            own["kind"] = gr.Dropdown(
                list(KINDS), value=kind, label=f"{name}: guidance", info=branches(kind), **place("kind", scale=3)
            )
            small, solvers = {"scale": 1, "min_width": 90}, list(get_args(Solver))
            steps = process.default_steps
            own["steps"] = gr.Number(steps, label="steps", precision=0, **place("steps", **small))
            solver = process.default_solver
            own["solver"] = gr.Dropdown(solvers, value=solver, label="solver", **place("solver", **small))
        with gr.Row():
            slider("scale", 10, "scale ω", "D_weak + ω·(D_strong − D_weak); 1: the strong branch alone", scale=3)
            own["interval"] = gr.Textbox(
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
            own["checkpoint"] = gr.Dropdown(
                [(SAME, ""), *((one, one) for one in explorer.others)],
                value="",
                label="second checkpoint, the weak branch's",
                info="one of this run, or any path that you type",
                allow_custom_value=True,
                **place("checkpoint", scale=3),
            )
            with gr.Column(scale=2, min_width=120):
                own["same_ids"] = gr.Checkbox(label="both route the same tokens", **place("same_ids"))
                own["force"] = gr.Checkbox(label="force likely mistakes", **place("force"))

    def choose(kind: str) -> list:
        return [gr.update(info=branches(kind)), *(gr.update(visible=one) for one in controls(kind).values())]

    outputs = [own[of] for of in ("kind", *shown)]
    own["kind"].input(choose, own["kind"], outputs, api_visibility="private", show_progress="hidden")
    return [own[item.name] for item in fields(Side)]
