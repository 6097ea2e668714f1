"""What --help says of a door: its docstring and its config file's own words, so that nothing stands twice."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

# a key, maybe commented out or an entry of the defaults list; its value; what the file says of it
_LINE = re.compile(
    r"(?P<off># )?(?P<indent> *)(?P<group>- (override )?/?)?(?P<key>[\w/]+):"
    r"(?P<value> +[^#\s][^#]*?)?( +# (?P<said>.*))?"
)
_MORE = re.compile(r" {5,}# (.*)")  # a comment that goes on


def short(doc: str, config: Path) -> str:
    """What a door does, usual overrides, and the keys of its config file; at most 60 lines of 120 columns.

    doc     the door's docstring.
    config  its config file: its head, up to the first blank line, has the overrides, and each key a comment.
    """
    head, _, body = config.read_text().partition("\n\n")
    told = [line.removeprefix("#").removeprefix(" ") for line in head.splitlines()]
    lines = [doc.strip(), "", *(line for line in told if not line or line not in doc), "", "Keys that are set most:"]
    entries = list(_entries(body))
    width = min(24, max(len(entry) for entry, _ in entries))
    for entry, said in entries:
        group = config.parent / entry.partition("=")[0]
        if others := [name for name in _choices(group) if not re.search(rf"\b{name}\b", said)]:
            said += f"; also {', '.join(others)}"
        lines += textwrap.wrap(f"  {entry:<{width}}  {said}", 120, subsequent_indent=" " * (width + 4))
    lines += ["", "--help all: every key with its comment. --cfg job: the values that a command would have."]
    text = "\n".join([*lines, f"The files are in {config.parent}"])
    if config.parent.parent.name == "doors":  # a wheel's, whose doors are commands
        text = re.sub(r"(accelerate launch|python) (train|sample|fid)\.py", r"tread-\2", text)
    return text


def _choices(group: Path) -> list[str]:
    return sorted(path.stem for path in group.glob("*.yaml"))


def _entries(body: str) -> Iterator[tuple[str, str]]:
    """(dotted key=value, comment) of a config file's keys; those commented out have no value."""
    section, found = "", []
    for line in body.partition("\nhydra:")[0].splitlines():
        if (more := _MORE.fullmatch(line)) and found:
            found[-1][1] += " " + more[1]
        match = _LINE.fullmatch(line)
        if match is None or match["key"].startswith("hydra"):
            continue
        if not match["indent"]:
            section = ""
        if match["value"] is None:
            section = match["key"] + "."
            continue
        name = match["key"] if match["group"] else section + match["key"]
        value = match["value"].strip().replace("???", "…")
        found.append([name if match["off"] else f"{name}={value}", match["said"] or ""])
    return map(tuple, found)


def whole(config: Path, words: Sequence[str]) -> str:
    """The text of a config file and of all that it is combined of, by the choices of a command line."""
    choices = dict(word.split("=", 1) for word in words if "=" in word)
    return "\n".join(f"# ---- {path}\n{path.read_text()}" for path in dict.fromkeys(_files(config, choices)))


def _files(config: Path, choices: dict[str, str]) -> Iterator[Path]:
    """A config file and those of its defaults list, in its order; the choices of the outermost file count."""
    listed = re.search(r"^defaults:.*\n((?: +[-#] .*\n)+)", config.read_text(), re.M)
    entries = []  # of files, and (group, choice)
    for line in listed[1].splitlines() if listed else ():
        match = _LINE.fullmatch(line)
        entries.append((match["key"], match["value"].strip()) if match else line.split("#")[0].strip(" -"))
    for group, choice in (entry for entry in entries if not isinstance(entry, str)):
        choices.setdefault(group, choice)
    yield config
    for entry in entries:
        name = entry if isinstance(entry, str) else f"{entry[0]}/{choices[entry[0]]}"
        if (path := config.parent / f"{name}.yaml").is_file():
            yield from _files(path, choices)
