"""The page of scripts/explore.py: two sides with the same classes and seeds, on this machine alone, without a network.

What its controls mean and do is explore.py's; this file alone knows gradio.
"""

from __future__ import annotations

import html
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import fields
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
STYLE = """
.told {margin: 0; min-height: 3em}
.refused {margin: 0; min-height: 3em; color: var(--error-text-color, #b91c1c); font-weight: 600}
.branches {margin: 0; color: var(--body-text-color-subdued)}
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
            why = "another program, maybe another page, listens there" if error.errno == 98 else error.strerror
            raise OSError(f"port {port} of {HOST} can't be used: {why}; port={port + 1} takes another") from error


def serve(explorer: Explorer, port: int, ready: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C.

    ready  is called with its address once it is there.
    """
    gradio = import_gradio()
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(filter(None, (os.environ.get("no_proxy"), HOST)))
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
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
            theme=gradio.themes.Default(**fonts),
            css=STYLE,
        )
        ready(f"http://{HOST}:{port}")
        threading.Event().wait()
    finally:
        page.close(verbose=False)


def _build(gr: ModuleType, explorer: Explorer):
    names = explorer.class_names
    with gr.Blocks(title=explorer.title, analytics_enabled=False, delete_cache=(3600, 3600)) as page:
        gr.Markdown(f"### {explorer.title}\n{explorer.about}")
        with gr.Row(equal_height=True):
            first = [list(names.values())[n] for n in spread_classes(len(explorer.trained.latents.classes), 4)]
            classes = gr.Dropdown(
                list(names.items()), value=first, multiselect=True, label="Classes, a row each", scale=3
            )
            seeds = gr.Textbox("0-5", label="Seeds, a column each", info="0-5, or 3, or 1, 4, 9", scale=1)
            button = gr.Button("Draw A and B", variant="primary", scale=1)
        with gr.Row():
            sides = [_controls(gr, explorer, name, kind) for name, kind in (("A", "none"), ("B", _guided(explorer)))]
        with gr.Row():
            results = [_results(gr, name) for name in ("A", "B")]

        def draw(labels: list[int], seeds: str, *values) -> tuple[Image.Image | None, str, str]:
            return _answer(explorer, Side(*values), labels, seeds)

        for start in (button.click, seeds.submit):
            step = None
            for side, result in zip(sides, results):
                step = (step.then if step else start)(
                    draw,
                    [classes, seeds, *side],
                    result,
                    concurrency_id="draw",
                    concurrency_limit=1,
                    api_visibility="private",
                    show_progress_on=result[0],
                )
    return page


def _guided(explorer: Explorer) -> str:
    """The kind that side B starts with: the first that the network takes."""
    return "cfg" if explorer.trained.label_drop else "sparse"


def _answer(explorer: Explorer, side: Side, labels: list[int], seeds: str) -> tuple[Image.Image | None, str, str]:
    """What a side shows: grid, what it is, and its command; or no grid, and the one line that says why."""
    try:
        shown = explorer.draw(side, labels, seeds)
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        line = " ".join(str(error).split())
        return None, f'<p class="refused" role="alert">{html.escape(line)}</p>', ""
    return shown.grid, f'<p class="told">{html.escape(shown.told)}</p>', shown.command


def _results(gr: ModuleType, name: str) -> list:
    with gr.Column():
        told = gr.HTML('<p class="told">Not drawn yet.</p>', elem_id=f"told-{name}")
        grid = gr.Image(
            label=name, format="png", type="pil", height=400, buttons=["download", "fullscreen"], elem_id=f"grid-{name}"
        )
        command = gr.Textbox(
            label=f"{name} as a command",
            lines=2,
            interactive=False,
            buttons=["copy"],
            elem_id=f"command-{name}",
            elem_classes="command",
        )
    return [grid, told, command]


def _controls(gr: ModuleType, explorer: Explorer, name: str, kind: str) -> list:
    """The controls of one side, in the order of the fields of Side; those without an effect for its kind are hidden."""
    process, shown, level = explorer.trained.process, controls(kind), explorer.trained.process.level_name
    start = Side(kind)
    with gr.Column(), gr.Group():
        own = {"kind": gr.Dropdown(list(KINDS), value=kind, label=f"{name}: guidance", elem_id=f"kind-{name}")}
        about = gr.HTML(_about(kind), padding=True)
        own["scale"] = gr.Slider(
            0,
            10,
            value=start.scale,
            step=0.05,
            label="ω",
            info="1 is the strong branch alone, at its cost; above 1, away from the weak branch",
            visible=shown["scale"],
        )
        with gr.Row():
            for ratio, of in (("strong", "strong"), ("weak", "weak")):
                own[ratio] = gr.Slider(
                    0,
                    0.95,
                    value=getattr(start, ratio),
                    step=0.05,
                    label=f"{ratio} ratio",
                    info=f"share of tokens routed around in the {of} branch",
                    visible=shown[ratio],
                )
        with gr.Row():
            own["lowest"] = gr.Number(None, label=f"guided from {level}", visible=shown["lowest"], min_width=80)
            own["highest"] = gr.Number(None, label=f"to {level}", visible=shown["highest"], min_width=80)
            own["steps"] = gr.Number(process.default_steps, label="steps", precision=0, min_width=80)
            own["solver"] = gr.Dropdown(
                list(get_args(Solver)), value=process.default_solver, label="solver", min_width=80
            )
        own["checkpoint"] = gr.Dropdown(
            ["", *explorer.others],
            value="",
            label="second checkpoint, of the weak branch",
            info="one of this run, or any path; empty: the weak branch is the same network",
            allow_custom_value=True,
            visible=shown["checkpoint"],
        )
        with gr.Row():
            own["same_ids"] = gr.Checkbox(label="same tokens in both branches", visible=shown["same_ids"])
            own["force"] = gr.Checkbox(label="run likely mistakes too (force)", visible=shown["force"])
    listed = [own[item.name] for item in fields(Side)]
    changing = [name for name in shown if name in own]

    def choose(kind: str) -> list:
        return [_about(kind), *(gr.update(visible=controls(kind)[name]) for name in changing)]

    own["kind"].change(
        choose,
        own["kind"],
        [about, *(own[name] for name in changing)],
        api_visibility="private",
        show_progress="hidden",
    )
    return listed


def _about(kind: str) -> str:
    return f'<p class="branches">{html.escape(branches(kind))}</p>'
