"""One HTML page that needs nothing beside itself: texts, tables, curves (plotly) and pictures, for people.

All text that is not in page.html, page.css or page.js is escaped here. The page forbids itself every request (its
Content-Security-Policy), so it shows the same without a network, in years.
"""

import base64
import html
import io
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from PIL import Image

from tread.drawing.charts import Panel
from tread.runtime.files import explain_failure, whole_file

HERE = Path(__file__).resolve().parent
POINTS = 2000  # of a curve; of longer ones each second, third, … is drawn
NUMBER = re.compile(r"[-–+]?[\d.,]*\d(e[-+]?\d+)?( ?(%|s|±.*|of [\d,/]+))?|–")
SIDE = 1000  # pixels of a picture at most
BYTES = 150_000  # of a file that is taken as it is


class Page:
    """Sections of elements, in order; `write` makes the file."""

    def __init__(self, title: str, subtitle: str) -> None:
        self.title, self.subtitle = title, subtitle
        self.sections: dict[str, list[str]] = {}
        self.charts: list[list[dict]] = []

    def section(self, title: str) -> None:
        self.sections[title] = []

    def add(self, element: str) -> None:
        """Append HTML to the last section."""
        self.sections[next(reversed(self.sections))].append(element)

    def heading(self, text: str) -> None:
        self.add(f"<h3>{escape(text)}</h3>")

    def text(self, text: str) -> None:
        self.add(f'<p class="note">{escape(text)}</p>')

    def points(self, texts: Sequence[str], kind: str = "plain") -> None:
        if texts:
            items = "".join(f"<li>{escape(text)}</li>" for text in texts)
            self.add(f'<div class="{kind}"><ul>{items}</ul></div>')

    def table(self, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """The first cell of a row names it; a column of numbers is set to the right."""
        right = [all(NUMBER.fullmatch(str(cell)) for cell in column) for column in zip(*rows)]

        def row(kind: str, cells: Sequence[object]) -> str:
            kinds = ["th", *[kind] * len(cells)]
            parts = [f"<{k}{' class=number' * r}>{escape(cell)}</{k}>" for k, cell, r in zip(kinds, cells, right)]
            return f"<tr>{''.join(parts)}</tr>"

        body = "".join(row("td", cells) for cells in rows)
        table = f"<table><thead>{row('th', head)}</thead><tbody>{body}</tbody></table>"
        self.add(f'<div class="wide" tabindex="0">{table}</div>')

    def folded(self, summary: str, text: str) -> None:
        self.add(f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>")

    def curves(self, charts: Sequence[Mapping[str, Panel]]) -> None:
        """Plots, each by the name of its x-axis ("" where there is one), under one switch and one button a line."""
        self.charts.append([{axis: _plain(panel) for axis, panel in chart.items()} for chart in charts])
        self.add('<div class="charts"></div>')

    def slider(self, rows: Mapping[str, Mapping[int, str]]) -> None:
        """Pictures side by side: name → step → data URI. One slider for all shows each one's newest up to a step."""
        steps = sorted({step for pictures in rows.values() for step in pictures})
        figures = []
        for name, pictures in rows.items():
            shown = [
                f'<img data-step="{step}" alt="samples of {escape(name)} at step {step}" src="{uri}"'
                f"{' hidden' * (step != max(pictures))}>"
                for step, uri in sorted(pictures.items())
            ]
            caption = f"<figcaption>{escape(name)}, <b>step {max(pictures):,}</b></figcaption>"
            figures.append(f"<figure>{caption}{''.join(shown)}</figure>")
        last = len(steps) - 1
        control = f'<input type="range" aria-label="training step" min="0" max="{last}" value="{last}"'
        control = f'<div class="slider">{control} data-steps="{json.dumps(steps)}"><output></output></div>'
        self.add(f'<div class="samples">{control}<div class="pictures">{"".join(figures)}</div></div>')

    def write(self, path: Path) -> None:
        """Raises OSError if it can't be written, ImportError without plotly."""
        try:
            from plotly.offline import get_plotlyjs  # imported here because only the main process draws, at the end
        except ImportError as error:
            raise ImportError(f"the page needs plotly: pip install -r requirements.txt ({error})") from error
        anchors = {title: re.sub(r"\W+", "-", title.lower()) for title in self.sections}
        links = [f'<a href="#{anchor}">{escape(title)}</a>' for title, anchor in anchors.items()]
        sections = [
            f'<section id="{anchors[title]}">\n<h2>{escape(title)}</h2>\n{"".join(content)}\n</section>'
            for title, content in self.sections.items()
        ]
        charts = json.dumps(self.charts, allow_nan=False)  # ASCII
        for sign in "<>&":  # so that it may stand inside a script element
            charts = charts.replace(sign, f"\\u{ord(sign):04x}")
        parts = {
            "title": escape(self.title),
            "subtitle": escape(self.subtitle),
            "style": (HERE / "page.css").read_text(encoding="utf-8"),
            "links": " ".join(links),
            "sections": "\n".join(sections),
            "charts": charts,
            "plotly": get_plotlyjs(),
            "script": (HERE / "page.js").read_text(encoding="utf-8"),
        }
        with explain_failure(path), whole_file(path, f".{os.getpid()}") as partial:
            partial.write_text(filled("page.html", parts), encoding="utf-8")


def filled(name: str, parts: Mapping[str, str]) -> str:
    """A file beside this one, with parts in the place of their names in double braces."""
    skeleton = (HERE / name).read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], skeleton)


def escape(text: object) -> str:
    """Any text for HTML; what is no character of Unicode, as in odd file names, by its number."""
    return html.escape(str(text).encode("utf-8", "backslashreplace").decode("utf-8"))


def _plain(panel: Panel) -> dict:
    """A panel for JSON: long curves with fewer points, numbers to six digits."""
    lines = []
    for line in panel.lines:
        every, last = math.ceil(len(line.x) / POINTS), len(line.x) - 1
        kept = [n for n in range(len(line.x)) if n % every == 0 or n == last]
        x, y, spread = (s and [float(f"{s[n]:.6g}") for n in kept] for s in (line.x, line.y, line.spread))
        lines.append(replace(line, x=x, y=y, spread=spread))
    return asdict(replace(panel, lines=lines))


def data_uri(path: Path) -> tuple[str, bool]:
    """A picture's file as a URI, and whether it was made smaller; a large one becomes a JPEG of at most SIDE pixels.

    Raises OSError or ValueError for what is no whole picture.
    """
    try:
        with Image.open(path) as picture:
            picture.load()  # a file that was cut short fails here
            if path.stat().st_size <= BYTES and max(picture.size) <= 2 * SIDE and picture.format == "PNG":
                return picture_uri("png", path.read_bytes()), False
            small = picture.convert("RGB")
    except (SyntaxError, Image.DecompressionBombError) as error:  # Pillow's, for broken PNGs and huge ones
        raise ValueError(str(error)) from error
    small.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=88)
    return picture_uri("jpeg", buffer.getvalue()), True


def picture_uri(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
