"""Nested dicts → dataclasses, by their annotations: every key known, of its type, or an error that says so."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints


def known_keys(kind: type, prefix: str = "") -> list[str]:
    """All dotted keys of the settings, sections included; the items of a list are written `*`."""
    keys = []
    for name, hint in get_type_hints(kind).items():
        keys.append(prefix + name)
        for part in filter(is_dataclass, (hint, *get_args(hint))):
            keys += known_keys(part, f"{prefix}{name}.{'*.' * (get_origin(hint) is tuple)}")
    return keys


def _unknown(key: str, known: Iterable[str]) -> ValueError:
    """The error for a key, with the known one that is spelt most like it; the last part counts most."""

    def likeness(other: str) -> float:
        (section, _, name), (other_section, _, other_name) = key.rpartition("."), other.rpartition(".")
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
            raise _unknown(key, known)


def read(tree: dict, kind: type, prefix: str = "") -> Any:
    """Nested dict → a dataclass, whose keys errors name with a prefix.

    Raises ValueError for unknown, missing or mistyped keys.
    """
    return _build(kind, tree, prefix, known_keys(kind, prefix))


def _build(kind: type, tree: Any, prefix: str, known: list[str]) -> Any:
    if not isinstance(tree, dict):
        raise ValueError(f"{prefix.rstrip('.')} is {tree!r}, but must be a section with keys")
    hints = get_type_hints(kind)
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
    allowed = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for kind in allowed:
        if get_origin(kind) is tuple and isinstance(value, (list, tuple)):
            return tuple(_convert(get_args(kind)[0], item, f"{key}.{i}", known) for i, item in enumerate(value))
        if is_dataclass(kind) and isinstance(value, dict):
            return _build(kind, value, key + ".", known)
        if type(value) is kind:
            return value
    if float in allowed and type(value) is int:
        return float(value)
    names = {tuple: "a list", types.NoneType: "null", bool: "true or false"}
    names |= {kind: f"{{{', '.join(item.name for item in fields(kind))}}}" for kind in allowed if is_dataclass(kind)}
    expected = [names.get(get_origin(kind) or kind) or kind.__name__ for kind in allowed]
    raise ValueError(f"{key} is {value!r}, but must be {' or '.join(expected)}")


def check_positive(section: str, **values: float | None) -> None:
    """Raise ValueError for the first setting of a section that is there and not above 0."""
    for key, value in values.items():
        if value is not None and value <= 0:
            raise ValueError(f"{section}.{key} is {value}, but must be positive")
