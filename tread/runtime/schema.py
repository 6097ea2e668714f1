"""Reads settings, nested dicts, into dataclasses by their annotations; unknown keys and wrong types raise ValueError.

Choices are Literals. In Annotated[type, …] a Range limits a number, a string is a hint for error messages, and a Chosen
marks a section whose dataclass is picked from a table. Numbers without a Range must be finite."""

import difflib
import json
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from tread.runtime.foreign_names import ours
from tread.runtime.plugins import import_plugins


class Range(NamedTuple):
    """The numbers that a setting allows: `must` describes them in errors ("be positive"), `holds` tests a number."""

    must: str
    holds: Callable[[float], bool]


Count = Annotated[int, Range("be positive and below 2³¹", lambda number: 0 < number < 2**31)]
CountOrZero = Annotated[int, Range("be 0 or more and below 2³¹", lambda number: 0 <= number < 2**31)]
TwoOrMore = Annotated[int, Range("be at least 2 and below 2³¹", lambda number: 2 <= number < 2**31)]
Positive = Annotated[float, Range("be positive and finite", lambda number: 0 < number <= sys.float_info.max)]
PositiveOrZero = Annotated[float, Range("be finite and not negative", lambda number: 0 <= number <= sys.float_info.max)]
Fraction = Annotated[float, Range("lie between 0 and 1", lambda number: 0 < number < 1)]
BelowOne = Annotated[float, Range("lie in [0, 1)", lambda number: 0 <= number < 1)]
Share = Annotated[float, Range("lie in [0, 1]", lambda number: 0 <= number <= 1)]
_FINITE = Range("be a finite number", lambda number: abs(number) <= sys.float_info.max)  # nan compares as False


class Chosen(NamedTuple):
    """Marks a section of the settings whose dataclass depends on a choice in it: the section's value at `key` names an
    entry of `table`. Keys that only other entries have are dropped; of these, keys with a default must have it."""

    key: str
    table: Mapping[str, type]

    def settle(self, section: object, where: str) -> tuple[type, dict]:
        """Return the dataclass that a section of the settings names, and a copy of the section: defaults are added, and
        keys that only other entries of the table have are left out. Raises ValueError if the value of a key left out
        differs from its default, if any, or if no entry is named. `where` is the section's dotted key, for messages."""
        if not isinstance(section, dict) or self.key not in section:
            raise ValueError(f"{where} is {section!r}, but must be a section that has {self.key}")
        check(f"{where}.{self.key}", section[self.key], Annotated[Literal[tuple(self.table)], "or a plugin's"])
        kind, kept = self.table[section[self.key]], {}
        for name, value in section.items():
            owners = {entry: item for entry, other in self.table.items() for item in fields(other) if item.name == name}
            if section[self.key] in owners or not owners:
                kept[name] = value
            elif not any(item.default in (MISSING, value) for item in owners.values()):
                there = " or ".join(f"{where}={entry}" for entry in owners) + " has it"
                raise ValueError(f"{where}.{name} is {value!r}, but {section[self.key]} has no such choice: {there}")
        for item in fields(kind):
            if item.default is not MISSING:
                kept.setdefault(item.name, item.default)
        return kind, kept


def _hints(kind: type) -> dict[str, Any]:
    """Return {name: annotation} of a dataclass's fields, without its class variables."""
    hints = get_type_hints(kind, include_extras=True)
    return {item.name: hints[item.name] for item in fields(kind)}


def known_keys(kind: type, prefix: str = "") -> list[str]:
    """Return the dotted keys of dataclass `kind` and its sections, each after `prefix`; "*" stands for a list index."""
    keys = []
    for name, hint in _hints(kind).items():
        keys.append(prefix + name)
        for part in filter(is_dataclass, (hint, *get_args(hint), *_entries(hint))):
            keys += known_keys(part, f"{prefix}{name}.{'*.' * (get_origin(hint) is tuple)}")
    return list(dict.fromkeys(keys))


def _choices(hint: Any) -> list[Chosen]:
    return [said for said in get_args(hint) if isinstance(said, Chosen)]


def _entries(hint: Any) -> list[type]:
    return [entry for choice in _choices(hint) for entry in choice.table.values()]


def add_unstated(words: Iterable[str], kind: type) -> list[str]:
    """Return the command-line overrides `words` with Hydra's ++ ("add or change") before keys that may be missing from
    config files, such as options of one architecture. `kind` is the dataclass of the settings."""
    keys = set()
    for name, hint in _hints(kind).items():
        options = [item for entry in _entries(hint) for item in fields(entry)]
        keys |= {f"{name}.{item.name}" for item in options if item.default is not MISSING}
    return [f"++{word}" if word.partition("=")[0] in keys else word for word in words]


def _with_stars(key: str) -> str:
    return re.sub(r"\.\d+", ".*", key)


def _unknown(key: str, known: Collection[str]) -> ValueError:
    """Return the error for an unknown `key`, with a hint: our name for a foreign key, a similar key, or --help all."""
    if told := ours(key, known):
        return ValueError(f"unknown setting {key!r}; {told}")
    spelt = _with_stars(key)

    def likeness(other: str) -> float:
        (section, _, name), (other_section, _, other_name) = spelt.rpartition("."), other.rpartition(".")
        alike = difflib.SequenceMatcher(None, section, other_section).ratio()  # a key's last part counts most
        return alike + 2 * difflib.SequenceMatcher(None, name, other_name).ratio() + (name == other_name)

    nearest = max(known, key=likeness)
    alike = difflib.SequenceMatcher(None, *(other.rpartition(".")[2] for other in (key, nearest))).ratio() >= 0.5
    more = f"the nearest known one is {nearest!r}" if alike else "--help all prints all"
    return ValueError(f"unknown setting {key!r}; {more}")


def check_overrides(overrides: Iterable[str], known: Collection[str]) -> None:
    """Raise ValueError for the first override that is not key=value, has two dashes before a known key or a key not in
    `known`, or names a key twice in its value ({a:1,a:2}). Options like --cfg, their values, hydra.… and ~key pass."""
    overrides = list(overrides)
    for before, override in zip(["", *overrides], overrides):
        if not re.search("^[-~]|=", override) and not before.startswith("-"):  # after an option: its value
            raise ValueError(f"{override!r} is no setting, which is written key=value")
        if override.startswith("--") and override[2:].partition("=")[0] in known:
            raise ValueError(f"{override!r} is written {override[2:]!r}, without dashes")
        match = re.match(r"[+~]*([^-+~=\s][^=\s]*)=", override)
        if match and _with_stars(match[1]) not in known and not match[1].startswith("hydra"):
            raise _unknown(match[1], known)
        flat = re.search(r"=\s*\{([^{}\[\]]*)\}$", override)
        named = re.findall(r"(?:^|,)\s*([^:,]+?)\s*:", flat[1]) if flat else []
        if twice := [name for name in named if named.count(name) > 1]:
            raise ValueError(f"{override} names {twice[0]} twice")


def fill(tree: dict, kind: type) -> dict:
    """Return a copy of the settings `tree` in which missing keys, at any depth, have dataclass `kind`'s defaults.
    In sections marked as Chosen, keys that belong only to other choices are dropped. ValueError: see Chosen.settle."""
    filled = dict(tree)
    for item, hint in zip(fields(kind), _hints(kind).values()):
        value = tree.get(item.name, item.default)
        for choice in _choices(hint):
            hint = get_args(hint)[0]
            if isinstance(value, dict) and value.get(choice.key) in choice.table:
                hint, value = choice.settle(value, item.name)
        if is_dataclass(hint) and (isinstance(value, dict) or item.name not in tree):
            value = fill(value if isinstance(value, dict) else {}, hint)
        elif get_origin(hint) is tuple and isinstance(value, (list, tuple)):
            part = get_args(hint)[0]
            value = [fill(entry, part) if is_dataclass(part) else entry for entry in value]
        if value is not MISSING:
            filled[item.name] = value
    return filled


def written(value: object) -> str:
    """Format a value as one types it in a Hydra override, e.g. {a:[1,null]}."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def read(tree: dict, kind: type, prefix: str = "") -> Any:
    """Build the dataclass `kind` from a nested dict, after importing the plugins that the dict names. Raises ValueError
    for unknown or missing keys and for values of a wrong type or out of range; messages put `prefix` before a key."""
    if "plugins" in _hints(kind) and isinstance(tree, dict):
        import_plugins(_convert(tuple[str, ...], tree.get("plugins", ()), "plugins", []))
    return _build(kind, tree, prefix, known_keys(kind, prefix))


def as_read(tree: Any, built: Any) -> Any:
    """Return a copy of `tree` with the ints of `built`, made by read(tree, …): 1000 for 1e3. Lists stay as they are."""
    if isinstance(tree, dict):
        return {key: as_read(value, getattr(built, key, value)) for key, value in tree.items()}
    return built if type(built) is int else tree


def check(name: str, value: Any, kind: Any) -> None:
    """Raise ValueError unless `value` fits the annotation `kind`; the message calls it `name`."""
    _convert(kind, value, name, [])


def _build(kind: type, tree: Any, prefix: str, known: list[str]) -> Any:
    hints = _hints(kind)
    if not isinstance(tree, dict):
        raise ValueError(f"{prefix.rstrip('.')} is {tree!r}, but must be a section with keys: {', '.join(hints)}")
    for key in tree:
        if key not in hints:
            raise _unknown(f"{prefix}{key}", known)
    if missing := [item.name for item in fields(kind) if item.name not in tree and item.default is MISSING]:
        raise ValueError(f"missing settings: {', '.join(prefix + name for name in missing)}")
    values = {key: _convert(hints[key], value, prefix + key, known) for key, value in tree.items()}
    try:
        return kind(**values)
    except ValueError as error:
        if str(error).partition(" ")[0] not in hints:
            raise
        raise ValueError(f"{prefix}{error}") from error  # a dataclass's own error names the key without its section


def _convert(hint: Any, value: Any, key: str, known: list[str]) -> Any:
    """Check a value against a type annotation; return it with sections as dataclasses, lists as tuples, whole numbers
    as the annotation's float or int. Raises ValueError, which calls the value `key` and may suggest one of `known`."""
    for choice in _choices(hint):
        hint, value = choice.settle(value, key)
    if is_dataclass(hint):
        return _build(hint, value, key + ".", known)
    expected, notes = [], []
    for kind in get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,):
        kind, *said = get_args(kind) if get_origin(kind) is Annotated else (kind,)
        if get_origin(kind) is tuple and isinstance(value, (list, tuple)):
            return tuple(_convert(get_args(kind)[0], item, f"{key}.{i}", known) for i, item in enumerate(value))
        if is_dataclass(kind) and isinstance(value, dict):
            return _build(kind, value, key + ".", known)
        if type(value) is int and get_origin(kind) is Literal and str(value) in get_args(kind):
            return str(value)  # device=4090 is typed as a number
        choices = [(type(choice), choice) for choice in get_args(kind)] if get_origin(kind) is Literal else ()
        if type(value) is kind or (kind is float and type(value) is int) or (type(value), value) in choices:
            for limit in [limit for limit in said if isinstance(limit, Range)] or [_FINITE] * (kind is float):
                if not limit.holds(value):
                    raise ValueError(f"{key} is {value!r}, but must {limit.must}")
            return float(value) if kind is float else value
        expected += _names(kind)
        notes += [f" ({note})" for note in said if isinstance(note, str)]
    if "int" in expected and type(value) is float and value.is_integer():
        return _convert(hint, int(value), key, known)
    *first, last = expected
    listed = f"{', '.join(first)} or {last}" if first else last
    raise ValueError(f"{key} is {value!r}, but must be {listed}{''.join(notes)}")


def _names(kind: Any) -> list[str]:
    """Return a type's names in error messages: all choices of a Literal, else one name."""
    if get_origin(kind) is Literal:
        return [str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in get_args(kind)]
    if is_dataclass(kind):
        return [f"{{{', '.join(item.name for item in fields(kind))}}}"]
    names = {tuple: "a list", types.NoneType: "null", bool: "true or false", dict: "a section"}
    return [names.get(get_origin(kind) or kind) or kind.__name__]
