"""What annotations say of a setting. The reference is typing's own reading of them: get_args, and arithmetic's."""

import math
import re
from dataclasses import asdict, dataclass
from typing import Annotated, Literal, get_args

import pytest

from tread.runtime.schema import Count, CountOrZero, Positive, Range, Share, TwoOrMore, as_read, fill, read

Kind = Annotated[Literal["a", "b", "c"], "d is elsewhere"]
When = Literal["auto", True, False]


@dataclass(frozen=True)
class Part:
    """One of each."""

    kind: Kind | None = None
    when: When = "auto"
    count: Count | None = None
    start: CountOrZero = 0
    several: TwoOrMore = 2
    width: Positive | None = None
    share: Share = 0.0
    shift: float = 0.0
    odd: Annotated[int, Range("be odd", lambda number: number % 2 == 1)] = 1
    shares: tuple[Share, ...] = ()


@dataclass(frozen=True)
class Whole:
    part: Part


def of(key, value):
    return getattr(read({"part": {key: value}}, Whole).part, key)


def test_choices_are_those_of_the_literal():
    assert [of("kind", value) for value in (*get_args(get_args(Kind)[0]), None)] == ["a", "b", "c", None]
    assert all(of("when", value) is value for value in get_args(When))


WHOLE, REAL = (-1, 0, 1, 2, 3), (-1, -0.5, 0, 1e-9, 0.5, 1, 1.0000001, 2, math.inf, math.nan)


@pytest.mark.parametrize(
    "key, kind, numbers, holds",
    [
        ("count", int, WHOLE, lambda x: x > 0),
        ("start", int, WHOLE, lambda x: x >= 0),
        ("several", int, WHOLE, lambda x: x > 1),
        ("odd", int, WHOLE, lambda x: x in (-1, 1, 3)),
        ("width", float, REAL, lambda x: 0 < x < math.inf),
        ("share", float, REAL, lambda x: 0 <= x <= 1),
        ("shift", float, REAL, math.isfinite),
    ],
)
def test_ranges_are_those_of_arithmetic(key, kind, numbers, holds):
    for number in numbers:
        if holds(number):
            assert of(key, number) == number and type(of(key, number)) is kind
        else:
            with pytest.raises(ValueError, match=rf"^part\.{key} is {number}, but must "):
                of(key, number)


@pytest.mark.parametrize(
    "key, value, shown",
    [
        ("kind", "d", "part.kind is 'd', but must be a, b, c or null (d is elsewhere)"),
        ("when", 1, "part.when is 1, but must be auto, true or false"),
        ("count", 1.5, "part.count is 1.5, but must be int or null"),
        ("count", True, "part.count is True, but must be int or null"),
        ("shift", 10**400, f"part.shift is {10**400}, but must be a finite number"),
        ("share", "half", "part.share is 'half', but must be float"),
        ("shares", [0.5, 1.5], "part.shares.1 is 1.5, but must lie in [0, 1]"),
    ],
)
def test_errors_name_the_key_what_was_given_and_what_is_needed(key, value, shown):
    with pytest.raises(ValueError, match=f"^{re.escape(shown)}$"):
        of(key, value)


def test_whole_floats_are_counts_in_the_settings_and_in_their_record():
    """As Hydra reads train.steps=1e3; a float stays one."""
    tree = {"count": 1e3, "share": 1.0, "shares": [1.0]}
    part = read(tree, Part)
    assert part.count == 1000 and type(part.count) is int
    assert repr(as_read(tree, part)) == repr({**tree, "count": 1000})


@dataclass(frozen=True)
class Group:
    name: str
    part: Part
    parts: tuple[Part, ...]
    maybe: Part | None
    words: tuple[str, ...] = ("a",)


def test_what_a_record_lacks_is_filled_with_defaults():
    """Reference: asdict. What has no default stays away, and what is given, or is no section at all, as it is."""
    defaults = {**asdict(Part()), "shares": []}
    assert fill({}, Group) == {"part": defaults, "words": ["a"]}
    given = {"part": {"count": 3}, "parts": [{"share": 0.5}], "maybe": {"count": 2}, "words": [], "unknown": 1}
    expected = {**given, "part": defaults | {"count": 3}, "parts": [defaults | {"share": 0.5}]}
    assert fill(given, Group) == expected
    assert fill({"part": 7, "parts": None}, Group) == {"part": 7, "parts": None, "words": ["a"]}
