"""Class labels of samples: drawn from seeds, given as class numbers, or spread over all classes."""

import difflib
import operator
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from tread.runtime.randomness import generator
from tread.runtime.schema import check

Labels = Literal["random", "balanced"]
Label = str | int | None  # a class's name or number; None: no class


def seeded_labels(seeds: Sequence[int], num_classes: int, mode: Labels) -> Tensor:
    """Return classes (n,) int64, one from each seed. mode "random": drawn uniformly from the classes; "balanced": the
    seed modulo num_classes, so that consecutive seeds have each class equally often."""
    check("labels", mode, Labels)
    if mode == "balanced":
        return torch.tensor([seed % num_classes for seed in seeds])
    return torch.tensor([int(torch.randint(num_classes, (), generator=generator(seed, "label"))) for seed in seeds])


def class_number(label: Label, classes: Sequence[str]) -> int | None:
    """Return the number of class `label`; numbers and None pass unchecked. ValueError if none or several have it."""
    if not isinstance(label, str):
        return None if label is None else operator.index(label)
    numbers = [number for number, name in enumerate(classes) if name == label]
    if len(numbers) > 1:
        raise ValueError(f"{label!r} is the name of classes {numbers}: give a number")
    if not numbers:
        near = difflib.get_close_matches(label, classes, 3) or classes[:10]
        raise ValueError(f"{label!r} is no class of this network; there are {', '.join(near)}, …")
    return numbers[0]


def class_labels(classes: Sequence[int | None], num_classes: int, label_drop: float) -> list[int]:
    """Return class numbers as labels; None means no class and becomes num_classes, the null class. Raises ValueError
    for unknown classes, and for None if label_drop, training's label dropout rate, is 0 (null class untrained)."""
    for position, number in enumerate(classes):
        if number is not None and not 0 <= number < num_classes:
            known = f"the classes are 0..{num_classes - 1}, and null is no class"
            raise ValueError(f"classes.{position} is {number}, but {known}")
        if number is None and label_drop == 0:
            raise ValueError(f"classes.{position} is null, but the network knows no null class: train.label_drop was 0")
    return [num_classes if number is None else number for number in classes]


def spread_classes(num_classes: int, count: int) -> list[int]:
    """Return `count` class numbers, or all if there are fewer, spread evenly from the first class to the last."""
    return torch.linspace(0, num_classes - 1, min(count, num_classes)).round().int().tolist()
