"""Writes an HTML page of texts, tables, curves (plotly) and pictures that needs no other file and no network.

All text that does not come from page.html, page.css or page.js is escaped here. The page's Content-Security-Policy
forbids every request, so that the page will look the same years from now.
"""

import base64
import html
import io
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from PIL import Image

from tread.drawing.charts import Panel
from tread.runtime.files import explain_failure, whole_file

HERE = Path(__file__).resolve().parent
POINTS = 2000  # points of a curve; of longer ones every second, third, … is drawn
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
        with its lines}; the name is "" if there is only one x-axis."""
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
        """Write the page to `path`. Raises OSError if that fails, ImportError if plotly is missing."""
        try:
            from plotly.offline import get_plotlyjs  # imported here because only the main process draws, at the end
        except ImportError as error:
            raise ImportError(f"the page needs plotly: pip install -r requirements.txt ({error})") from error
        links, sections = [], []
        for title, content in self.sections.items():
            anchor, shown = re.sub(r"\W+", "-", title.lower()), escape(title)
            links.append(f'<a href="#{anchor}">{shown}</a>')
            sections.append(f'<section id="{anchor}">\n<h2>{shown}</h2>\n{"".join(content)}\n</section>')
        charts = json.dumps(self.charts, allow_nan=False)  # ASCII
        for sign in "<>&":  # escaped, as they could end the script element
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
        empty = (HERE / "page.html").read_text(encoding="utf-8")
        whole = re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], empty)
        with explain_failure(path), whole_file(path, f".{os.getpid()}") as partial:
            partial.write_text(whole, encoding="utf-8")


def escape(text: object) -> str:
    """Escape any text for HTML; bytes of file names that are not Unicode become backslash escapes."""
    return html.escape(str(text).encode("utf-8", "backslashreplace").decode("utf-8"))


def _plain(panel: Panel) -> dict:
    """Convert a panel to a dict for JSON: lines thinned to about POINTS points, numbers rounded to six digits."""
    plain = asdict(panel)
    for line in plain["lines"]:
        count = len(line["x"])
        kept = sorted({*range(0, count, math.ceil(count / POINTS) or 1), *range(count)[-1:]})
        for key in ("x", "y", "spread"):
            line[key] = line[key] and [float(f"{line[key][n]:.6g}") for n in kept]
    return plain


def data_uri(path: Path) -> tuple[str, bool]:
    """Return a picture's file as a data URI, and whether it was converted: large files, and all but PNGs, become JPEGs,
    shrunk to SIDE pixels a side. Raises OSError or ValueError if the file is not a complete picture."""
    kind, content = "png", path.read_bytes()
    try:
        with Image.open(io.BytesIO(content)) as picture:
            picture.load()  # a truncated file fails here
    except (SyntaxError, Image.DecompressionBombError) as error:  # Pillow's, for broken PNGs and huge ones
        raise ValueError(str(error)) from error
    if reduced := len(content) > BYTES or max(picture.size) > 2 * SIDE or picture.format != "PNG":
        small, buffer = picture.convert("RGB"), io.BytesIO()
        small.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
        small.save(buffer, "JPEG", quality=88)
        kind, content = "jpeg", buffer.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}", reduced
