"""Writes an HTML page of texts, tables, curves (plotly) and pictures that needs no other file and no network.

All text that does not come from page.html, page.css or page.js is escaped here. The page's Content-Security-Policy
forbids every request, so that the page will look the same years from now."""

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
POINTS = 2000  # largest number of points in a curve; longer curves are drawn with every 2nd, 3rd, … point
NUMBER = re.compile(r"[-–+]?[\d.,]*\d(e[-+]?\d+)?( ?(%|s|±.*|of [\d,/]+))?|–")
SIDE = 1000  # largest side of a reduced picture, in pixels
BYTES = 150_000  # largest PNG that is embedded unchanged


class Page:
    """An HTML page under construction: sections of elements, in the order in which they are added."""

    def __init__(self, title: str, subtitle: str) -> None:
        self.title, self.subtitle = title, subtitle
        self.sections: dict[str, list[str]] = {}
        self.charts: list[list[dict]] = []

    def section(self, title: str) -> None:
        self.sections[title] = []

    def add(self, element: str) -> None:
        """Append HTML, unescaped, to the last section; there must be one."""
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
        """Append a table; the first cell of a row is its name, and columns of numbers are aligned to the right."""
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
        """Append charts that share buttons for the x-axis and the lines to show. A chart is {name of an x-axis: Panel
        with its lines}; a name is not shown if there is only one x-axis."""
        self.charts.append([{axis: _plain(panel) for axis, panel in chart.items()} for chart in charts])
        self.add('<div class="charts"></div>')

    def slider(self, rows: Mapping[str, Mapping[int, str]]) -> None:
        """Append a slider over training steps and, for each name in {name: {step: data URI of a picture}}, the newest
        picture up to the chosen step. If there is none yet, the first picture is shown."""
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
        """Write the page to `path`. Raises OSError if that fails, ValueError if plotly is missing."""
        try:
            from plotly.offline import get_plotlyjs  # imported here because only the main process draws, at the end
        except ImportError as error:
            raise ValueError(f"the page needs plotly: pip install -r requirements.txt ({error})") from error
        anchors = {title: re.sub(r"\W+", "-", title.lower()) for title in self.sections}
        links = [f'<a href="#{anchor}">{escape(title)}</a>' for title, anchor in anchors.items()]
        sections = [
            f'<section id="{anchors[title]}">\n<h2>{escape(title)}</h2>\n{"".join(content)}\n</section>'
            for title, content in self.sections.items()
        ]
        escapes = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&"}  # these could end the script element
        charts = json.dumps(self.charts, allow_nan=False).translate(escapes)  # ASCII
        template = (HERE / "page.html").read_text(encoding="utf-8")
        parts = {  # key → text to put in the place of {{key}} in the template
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
            partial.write_text(re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], template), encoding="utf-8")


def escape(text: object) -> str:
    """Escape any text for HTML; bytes of file names that are not Unicode become backslash escapes."""
    return html.escape(str(text).encode("utf-8", "backslashreplace").decode("utf-8"))


def _plain(panel: Panel) -> dict:
    """Convert a panel to a dict for JSON: lines thinned to about POINTS points, numbers rounded to six digits."""
    lines = []
    for line in panel.lines:
        every, last = math.ceil(len(line.x) / POINTS), len(line.x) - 1
        kept = [n for n in range(len(line.x)) if n % every == 0 or n == last]
        x, y, spread = (s and [float(f"{s[n]:.6g}") for n in kept] for s in (line.x, line.y, line.spread))
        lines.append(replace(line, x=x, y=y, spread=spread))
    return asdict(replace(panel, lines=lines))


def data_uri(path: Path) -> tuple[str, bool]:
    """Return (data URI, converted) for a picture file: PNGs over BYTES bytes or 2·SIDE pixels a side and other formats
    are converted to JPEGs of at most SIDE pixels a side. Raises OSError or ValueError if the picture is incomplete."""
    try:
        with Image.open(path) as picture:
            picture.load()  # a truncated file fails here
            kept = path.stat().st_size <= BYTES and max(picture.size) <= 2 * SIDE and picture.format == "PNG"
            small = picture.convert("RGB")
    except (SyntaxError, Image.DecompressionBombError) as error:  # Pillow's, for broken PNGs and huge ones
        raise ValueError(str(error)) from error
    if not kept:
        small.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        small.save(buffer, "JPEG", quality=88)
    kind, content = ("png", path.read_bytes()) if kept else ("jpeg", buffer.getvalue())
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}", not kept
