"""One HTML page that needs nothing beside itself: texts, tables, curves (plotly) and pictures, for people.

What stands in page.html, page.css and page.js is the page's; all other text is escaped here. The page forbids itself
every request (its Content-Security-Policy), so it shows the same without a network, in years. Pictures inside it are
bounded in size: few of many, large ones smaller.
"""

from __future__ import annotations

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

from tread.drawing.charts import Line, Panel
from tread.runtime.files import explain_failure, whole_file

POINTS = 2000  # of a curve; of longer ones each second, third, … is drawn
NUMBER = re.compile(r"[-–+]?[\d.,]*\d(e[-+]?\d+)?( ?(%|s|±.*|of [\d,/]+))?|–")
Chart = Mapping[str, Panel]  # by the name of what it is drawn against, "" where there is no choice
SIDE = 1000  # pixels of a picture at most
BYTES = 150_000  # of a file that is taken as it is


class Page:
    """Sections of elements, in order; `write` makes the file."""

    def __init__(self, title: str, subtitle: str) -> None:
        self.title, self.subtitle = title, subtitle
        self.sections: list[tuple[str, list[str]]] = []
        self.charts: list[list[dict]] = []

    def section(self, title: str) -> None:
        self.sections.append((title, []))

    def add(self, element: str) -> None:
        self.sections[-1][1].append(element)

    def heading(self, text: str) -> None:
        self.add(f"<h3>{escape(text)}</h3>")

    def text(self, text: str, kind: str = "note") -> None:
        self.add(f'<p class="{kind}">{escape(text)}</p>')

    def points(self, texts: Sequence[str], kind: str = "plain") -> None:
        items = "".join(f"<li>{escape(text)}</li>" for text in texts)
        self.add(f'<div class="{kind}"><ul>{items}</ul></div>')

    def table(self, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """The first cell of a row names it; a column of numbers is set to the right."""
        columns = list(zip(*rows))
        right = [all(NUMBER.fullmatch(str(cell)) for cell in column) for column in columns]

        def cell(kind: str, text: object, number: bool) -> str:
            return f"<{kind}{' class=number' * number}>{escape(text)}</{kind}>"

        top = "".join(cell("th", text, number) for text, number in zip(head, right))
        lines = "".join(
            f"<tr>{cell('th', row[0], False)}{''.join(map(cell, ['td'] * len(row), row[1:], right[1:]))}</tr>"
            for row in rows
        )
        self.add(
            f'<div class="wide" tabindex="0"><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'
        )

    def shares(self, each: Mapping[str, tuple[Mapping[str, tuple[str, float]], str]]) -> None:
        """Side by side, title → parts and a note. A part: name → what it is, and its share in [0, 1], drawn as bar."""
        blocks = []
        for title, (parts, note) in each.items():
            lines = "".join(
                f"<tr><th>{escape(name)}</th><td class=number>{escape(text)}</td><td class=number>{share:.1%}</td>"
                f'<td><span class="share"><i style="width:{share:.1%}"></i></span></td></tr>'
                for name, (text, share) in parts.items()
            )
            table = f'<div class="wide" tabindex="0"><table><tbody>{lines}</tbody></table></div>'
            heading = f"<h3>{escape(title)}</h3>" if title else ""
            blocks.append(f'<div>{heading}{table}<p class="note">{escape(note)}</p></div>')
        self.add(f'<div class="blocks">{"".join(blocks)}</div>')

    def folded(self, summary: str, text: str) -> None:
        self.add(f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>")

    def curves(self, charts: Sequence[Chart]) -> None:
        """Plots that share one switch of what they are drawn against, and one button a name."""
        self.charts.append([{axis: _panel(panel) for axis, panel in chart.items()} for chart in charts])
        self.add('<div class="charts"></div>')

    def slider(self, rows: Mapping[str, Mapping[int, str]]) -> None:
        """Pictures side by side: name → step → data URI. One slider for all shows each one's newest up to a step."""
        steps = sorted({step for pictures in rows.values() for step in pictures})
        figures = []
        for name, pictures in rows.items():
            last = max(pictures)
            shown = "".join(
                f'<img data-step="{step}" alt="samples of {escape(name)} at step {step}" src="{escape(uri)}"'
                f"{' hidden' * (step != last)}>"
                for step, uri in sorted(pictures.items())
            )
            figures.append(f"<figure><figcaption>{escape(name)}, <b>step {last:,}</b></figcaption>{shown}</figure>")
        control = (
            f'<div class="slider"><input type="range" aria-label="training step" min="0" max="{len(steps) - 1}" '
            f'value="{len(steps) - 1}" data-steps="{json.dumps(steps)}"><output>step {steps[-1]:,}</output></div>'
        )
        self.add(f'<div class="samples">{control}<div class="pictures">{"".join(figures)}</div></div>')

    def write(self, path: Path) -> None:
        """Raises OSError if it can't be written, ImportError without plotly."""
        try:
            from plotly.offline import get_plotlyjs  # imported here because only the main process draws, at the end
        except ImportError as error:
            raise ImportError(f"the page needs plotly: pip install -r requirements.txt ({error})") from error
        here = Path(__file__).resolve().parent
        titles = [title for title, _ in self.sections]
        parts = {
            "title": escape(self.title),
            "subtitle": escape(self.subtitle),
            "style": (here / "page.css").read_text(encoding="utf-8"),
            "links": " ".join(f'<a href="#{_anchor(title)}">{escape(title)}</a>' for title in titles),
            "sections": "\n".join(
                f'<section id="{_anchor(title)}">\n<h2>{escape(title)}</h2>\n{"".join(content)}\n</section>'
                for title, content in self.sections
            ),
            "charts": _json(self.charts),
            "plotly": get_plotlyjs(),
            "script": (here / "page.js").read_text(encoding="utf-8"),
        }
        skeleton = (here / "page.html").read_text(encoding="utf-8")
        text = re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], skeleton)
        with explain_failure(path), whole_file(path, f".{os.getpid()}") as partial:
            partial.write_text(text, encoding="utf-8")


def escape(text: object) -> str:
    """Any text as HTML shows it; what is no character of Unicode, as in odd file names, by its number."""
    return html.escape(str(text).encode("utf-8", "backslashreplace").decode("utf-8"))


def _anchor(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower())


def _panel(panel: Panel) -> dict:
    """For JSON; long curves with fewer points."""
    return asdict(replace(panel, lines=[_thinned(line) for line in panel.lines]))


def _thinned(line: Line) -> Line:
    """Each so-manieth point and the last, in six digits."""
    every = math.ceil(len(line.x) / POINTS)
    kept = sorted({*range(0, len(line.x), every), len(line.x) - 1}) if line.x else []

    def chosen(values: Sequence[float] | None) -> list[float] | None:
        return values and [float(f"{values[number]:.6g}") for number in kept]

    return replace(line, x=chosen(line.x), y=chosen(line.y), spread=chosen(line.spread))


def _json(value: object) -> str:
    """JSON that may stand inside a script element."""
    text = json.dumps(value, allow_nan=False)  # ASCII
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def spread(pictures: Mapping[int, Path], most: int) -> dict[int, Path]:
    """At most so many of them (two at least), evenly chosen by their order, with the first and the last."""
    steps = sorted(pictures)
    most = max(2, most)
    if len(steps) > most:
        steps = [steps[round(number * (len(steps) - 1) / (most - 1))] for number in range(most)]
    return {step: pictures[step] for step in steps}


def data_uri(path: Path) -> tuple[str, bool]:
    """A picture's file as a URI, and whether it was made smaller; a large one becomes a JPEG of at most SIDE pixels.

    Raises OSError or ValueError for what is no whole picture.
    """
    try:
        with Image.open(path) as picture:
            picture.load()  # a file that was cut short fails here
            large = path.stat().st_size > BYTES or max(picture.size) > 2 * SIDE
            if not large and picture.format == "PNG":
                return picture_uri("png", path.read_bytes()), False
            small = picture.convert("RGB")
    except (SyntaxError, Image.DecompressionBombError) as error:  # as Pillow says of broken PNGs, and of huge ones
        raise ValueError(str(error)) from error
    small.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=88)
    return picture_uri("jpeg", buffer.getvalue()), True


def picture_uri(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
