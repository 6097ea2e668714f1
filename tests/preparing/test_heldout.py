"""Which pictures are held out, against sorting each class by sha256 in plain Python."""

from hashlib import sha256

import numpy as np
import pytest

from tread.preparing.photos import held_out

SIZES = (50, 7, 1, 0, 30)


@pytest.fixture
def pictures():
    """Names and labels, in an order of their own."""
    names = [f"{label}/{number}.jpg" for label, size in enumerate(SIZES) for number in range(size)]
    order = np.random.default_rng(0).permutation(len(names))
    return [names[i] for i in order], np.repeat(np.arange(5), SIZES)[order]


@pytest.mark.parametrize(
    "wanted, counts",
    [
        (0.1, (5, 1, 0, 0, 3)),  # 8.8 of 88: 5, 0.7, 0.1, 0, 3
        (0.02, (1, 0, 0, 0, 1)),  # 1.76: 1, 0.14, 0.02, 0, 0.6
        (0.001, (1, 0, 0, 0, 0)),  # at least one
        (1, (1, 0, 0, 0, 0)),
        (10, (4, 3, 0, 0, 3)),
        (84, (49, 6, 0, 0, 29)),
    ],
)
def test_each_class_gives_those_with_the_smallest_hashes(pictures, wanted, counts):
    names, labels = pictures
    out = held_out(names, labels, 5, wanted)
    assert np.bincount(labels[out], minlength=5).tolist() == list(counts)
    for label, count in enumerate(counts):
        members = [name for name, of in zip(names, labels) if of == label]
        smallest = sorted(members, key=lambda name: sha256(name.encode()).digest())
        assert chosen(names, out, f"{label}/") == set(smallest[:count])


def chosen(names, out, beginning: str = "") -> set[str]:
    return {name for name, held in zip(names, out) if held and name.startswith(beginning)}


def test_a_beginning_chooses_a_split_and_too_many_are_refused(pictures):
    assert chosen(pictures[0], held_out(*pictures, 5, "4/")) == {f"4/{number}.jpg" for number in range(30)}
    assert not held_out(*pictures, 5, None).any()
    with pytest.raises(ValueError, match="heldout takes 87 pictures, but 84 can be held out: each class keeps one"):
        held_out(*pictures, 5, 0.99)


def test_pictures_of_other_classes_and_their_order_change_nothing(pictures):
    names, labels = pictures
    fewer = [index for index, name in enumerate(names) if not name.startswith("0/")][::-1]
    some = [names[i] for i in fewer]
    before = chosen(names, held_out(names, labels, 5, 0.2), "4/")
    assert before == chosen(some, held_out(some, labels[fewer], 5, 0.2), "4/") and len(before) == 6
