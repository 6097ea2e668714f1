"""Nested dicts → dataclasses, by their annotations: every key known, of its type, or an error that says so.

Choices are Literals. Annotated[…] adds a Range that a number must lie in, or a note, shown in brackets where
a value is refused. Numbers without a Range of their own must be finite.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from tread.runtime.foreign_names import ours


class Range(NamedTuple):
    """Which numbers a setting takes: what a number must do, as an error says it, and whether one does."""

    must: str
    holds: Callable[[float], bool]


_ABOVE_0 = Range("be positive", lambda number: number > 0)
Count = Annotated[int, _ABOVE_0]
CountOrZero = Annotated[int, Range("not be negative", lambda number: number >= 0)]
TwoOrMore = Annotated[int, Range("be at least 2", lambda number: number >= 2)]
Positive = Annotated[float, Range("be positive and finite", lambda number: 0 < number <= sys.float_info.max)]
PositiveOrZero = Annotated[float, Range("be finite and not negative", lambda number: 0 <= number <= sys.float_info.max)]
Fraction = Annotated[float, Range("lie between 0 and 1", lambda number: 0 < number < 1)]
BelowOne = Annotated[float, Range("lie in [0, 1)", lambda number: 0 <= number < 1)]
Share = Annotated[float, Range("lie in [0, 1]", lambda number: 0 <= number <= 1)]
_FINITE = Range("be a finite number", lambda number: abs(number) <= sys.float_info.max)  # nan compares as False


def _hints(kind: type) -> dict[str, Any]:
    """The annotations of a dataclass's fields; its class variables are no settings."""
    hints = get_type_hints(kind, include_extras=True)
    return {item.name: hints[item.name] for item in fields(kind)}


def known_keys(kind: type, prefix: str = "") -> list[str]:
    """All dotted keys of the settings, sections included; the items of a list are written `*`."""
    keys = []
    for name, hint in _hints(kind).items():
        keys.append(prefix + name)
        for part in filter(is_dataclass, (hint, *get_args(hint))):
            keys += known_keys(part, f"{prefix}{name}.{'*.' * (get_origin(hint) is tuple)}")
    return keys


def _unknown(key: str, known: Iterable[str]) -> ValueError:
    """The error for a key: what it is called here, if others know it so, else the known one that is spelt most like it.

    Of the spelling the last part counts most.
    """
    known, spelt = list(known), re.sub(r"\.\d+", ".*", key)
    if told := ours(key, known):
        return ValueError(f"unknown setting {key!r}; {told}")

    def likeness(other: str) -> float:
        (section, _, name), (other_section, _, other_name) = spelt.rpartition("."), other.rpartition(".")
        alike = difflib.SequenceMatcher(None, section, other_section).ratio()
        return alike + 2 * difflib.SequenceMatcher(None, name, other_name).ratio() + (name == other_name)

    return ValueError(f"unknown setting {key!r}; the nearest known one is {max(known, key=likeness)!r}")


def check_overrides(arguments: Iterable[str], known: Iterable[str], moved: Mapping[str, str] | None = None) -> None:
    """Look at Hydra overrides (key=value) and raise ValueError for the first key that is not known.

    moved  keys that are gone → what to set in their place.
    """
    known = list(known)
    for argument in arguments:
        match = re.match(r"[+~]*([^-+~=\s][^=\s]*)=", argument)
        key = re.sub(r"\.\d+", ".*", match[1]) if match else "hydra"
        if moved and key in moved:
            raise ValueError(f"{key} is gone; set {moved[key]} in its place")
        if key not in known and not key.startswith("hydra"):
            raise _unknown(match[1], known)


def written(value: object) -> str:
    """A value as Hydra reads it."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def read(tree: dict, kind: type, prefix: str = "") -> Any:
    """Nested dict → a dataclass, whose keys errors name with a prefix.

    Raises ValueError for unknown, missing or mistyped keys.
    """
    return _build(kind, tree, prefix, known_keys(kind, prefix))


def check(name: str, value: Any, kind: Any) -> None:
    """Raise ValueError unless a value is what a type says; for functions that are called by settings and by people."""
    _convert(kind, value, name, [])


def _build(kind: type, tree: Any, prefix: str, known: list[str]) -> Any:
    hints = _hints(kind)
    if not isinstance(tree, dict):
        raise ValueError(f"{prefix.rstrip('.')} is {tree!r}, but must be a section with keys: {', '.join(hints)}")
    for key in tree:
        if key not in hints:
            raise _unknown(f"{prefix}{key}", known)
    missing = [item.name for item in fields(kind) if item.name not in tree and item.default is MISSING]
    if missing:
        raise ValueError(f"missing settings: {', '.join(prefix + name for name in missing)}")
    values = {key: _convert(hints[key], value, prefix + key, known) for key, value in tree.items()}
    try:
        return kind(**values)
    except ValueError as error:
        if str(error).partition(" ")[0] not in hints:
            raise
        raise ValueError(f"{prefix}{error}") from error  # classes that are no settings name their own keys alone


def _convert(hint: Any, value: Any, key: str, known: list[str]) -> Any:
    """Check a value against a type annotation; whole numbers pass as floats."""
    if is_dataclass(hint):
        return _build(hint, value, key + ".", known)
    expected, notes = [], []
    for kind in get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,):
        kind, *said = get_args(kind) if get_origin(kind) is Annotated else (kind,)
        if get_origin(kind) is tuple and isinstance(value, (list, tuple)):
            return tuple(_convert(get_args(kind)[0], item, f"{key}.{i}", known) for i, item in enumerate(value))
        if is_dataclass(kind) and isinstance(value, dict):
            return _build(kind, value, key + ".", known)
        choices = [(type(choice), choice) for choice in get_args(kind)] if get_origin(kind) is Literal else ()
        if type(value) is kind or (kind is float and type(value) is int) or (type(value), value) in choices:
            for limit in [limit for limit in said if isinstance(limit, Range)] or [_FINITE] * (kind is float):
                if not limit.holds(value):
                    raise ValueError(f"{key} is {value!r}, but must {limit.must}")
            return float(value) if kind is float else value
        expected += _names(kind)
        notes += [f" ({note})" for note in said if isinstance(note, str)]
    *first, last = expected
    listed = f"{', '.join(first)} or {last}" if first else last
    raise ValueError(f"{key} is {value!r}, but must be {listed}{''.join(notes)}")


def _names(kind: Any) -> list[str]:
    """What errors call a type: one name, or its choices."""
    if get_origin(kind) is Literal:
        return [str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in get_args(kind)]
    if is_dataclass(kind):
        return [f"{{{', '.join(item.name for item in fields(kind))}}}"]
    names = {tuple: "a list", types.NoneType: "null", bool: "true or false", dict: "a section"}
    return [names.get(get_origin(kind) or kind) or kind.__name__]
