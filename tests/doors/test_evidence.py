"""The evidence pages say what their results.json say: each number of a table or a sentence is made anew from them.

References: studies/<name>/results.json through the one function that compares (studies/paired.py), the few numbers of
studies/once.json and studies/floor.json, the losses by photo, and the step times of benchmarks/results.
"""

import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT

from studies import figures, results, study

PAGES = ["docs/evidence.md", "docs/evidence-architectures.md", "docs/evidence-cifar10.md"]
BATCH = SimpleNamespace(train=SimpleNamespace(batch_size=64))  # of nearly all; with another no result would be found
NUMBER = re.compile(r"[-+−]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")


@functools.cache
def gathered(name: str) -> tuple[study.Study, results.Results]:
    base, gpu, _ = name.partition("_gpu")
    asked, made = study.read_study(base, gpu[1:] or "small"), results.finished(Path("nowhere"))
    with pytest.MonkeyPatch.context() as patch:
        if not gpu and not any(arm.flops for arm in asked.arms.values()):  # else a run's length needs its network
            patch.setattr(study, "settings_of", lambda *words: BATCH)
        return asked, results.gather(study.plan(asked, made=made), made)


@functools.cache
def tables(name: str) -> str:
    return figures.table(*gathered(name))


def read(path: str) -> dict:
    return json.loads((ROOT / path).read_text())


def rows(text: str) -> list[list[str]]:
    """The cells of each line of a Markdown table."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [row for row in cells if not set("".join(row)) <= {"-", " "}]


def found(name: str) -> dict[tuple[str, str], str]:
    """{(row, column): cell} of both of a study's tables."""
    cells: dict[tuple[str, str], str] = {}
    for part in tables(name).split("\n\n"):
        if part.startswith("|"):
            head, *lines = rows(part)
            cells |= {(row[0], column): cell for row in lines for column, cell in zip(head, row)}
    return cells


def numbers(text: str) -> list[str]:
    return [each.replace("−", "-").replace(",", "") for each in NUMBER.findall(text)]


def is_rounded(said: str, exact: float) -> bool:
    places = len(said.partition(".")[2])
    return abs(abs(float(said)) - abs(exact)) <= 0.5000001 * 10**-places


@pytest.mark.parametrize("page", PAGES)
def test_each_table_is_a_part_of_its_studys(page):
    marked = re.findall(r"<!-- study: (\w+) -->\n((?:\|.*\n)+)", (ROOT / page).read_text())
    assert len(marked) >= dict(zip(PAGES, (5, 2, 2)))[page]
    for name, text in marked:
        (head, *lines), cells = rows(text), found(name)
        assert 0 < len(lines) <= 5, name
        for row in lines:
            for column, said in list(zip(head, row))[1:]:
                exact = cells[row[0], column]
                exact = exact if "(" in said else re.sub(r" \([^)]*\)", "", exact)  # a page may leave the error out
                assert said == exact, (name, row[0], column)


@pytest.mark.parametrize("page", PAGES[:2])  # the third's are others' too
def test_each_exact_number_of_a_page_is_in_the_results(page):
    """All with three decimals or more, in sentences and in the first table, but those of others beside them."""
    left_out = r"(?sm)```.*?```|^\| (DiT|RWKV|Mamba|hybrid) \|.*$|<img.*?>"
    text = re.sub(left_out, "", (ROOT / page).read_text())
    others = {".753", ".832", ".597", ".519"}  # of the ablations at XL/2
    published = [path.parent.name for path in (ROOT / "studies").glob("*/results.json")]
    known = [float(each) for name in published for each in numbers(tables(name)) if "." in each]
    for name in ("once", "floor"):
        known += [float(each) for each in numbers((ROOT / "studies" / f"{name}.json").read_text()) if "." in each]
    pairs = read("studies/once.json")["made on a CPU and on an H100"]["runs"].values()
    less = [pair["h100"] - pair["cpu"] for pair in pairs]
    known += [np.mean(less), np.std(less, ddof=1), least_similar("routed"), least_similar("dense")]
    assert len(less) == 19
    for said in numbers(text):
        if len(said.partition(".")[2]) >= 3 and said.lstrip("+-0") not in others and said.lstrip("+-") not in others:
            assert any(is_rounded(said, exact) for exact in known), said


def least_similar(arm: str) -> float:
    """The least cosine between the outputs of blocks 2 to 8, over the seeds, with all tokens."""
    runs = read("studies/similarity/results.json")["runs"].values()
    word = {"dense": "model=dit", "routed": "model=tread"}[arm]
    scores = [score for run in runs if word in run["overrides"] for score in run["scores"].values() if "dense" in score]
    return float(min(np.array(score["dense"], dtype=float)[3:10, 3:10].min() for score in scores if score["dense"]))


def test_what_other_photos_would_change_is_of_the_losses_by_photo():
    losses, once = read("studies/by_photo.json"), read("studies/once.json")["held-out photos drawn anew"]
    drawn = np.random.default_rng(0).integers(0, 500, (10_000, 500))
    for pair in once.keys() - {"what"}:
        less = np.subtract(*(losses[name] for name in pair.split(" less ")))
        interval = np.quantile(less[drawn].mean(axis=1), [0.025, 0.975])
        assert all(map(is_rounded, map(str, once[pair]), [less.mean(), *interval])), pair


def test_the_tables_of_emojis_and_of_step_times_are_of_their_records():
    emojis, times = {}, {}
    for run in read("studies/text/results.json")["runs"].values():
        for score in run["scores"].values():
            words = dict(word.split("=") for word in score["words"])
            network = "dense" if "model=dit_text" in run["overrides"] else "routed"
            guided = f", {words['guidance']} {words['guidance.scale']}" if "guidance" in words else ""
            keys = ("seen_top1", "seen_top5", "held_top1", "held_top5", "seen_top1_inception", "held_top1_inception")
            emojis[network + guided] = [float(words["steps"]), *(score[key] for key in keys)]
    for name, record in read("benchmarks/results/step_time_rows_cpu.json").items():
        dense, routed = record["kinds"]["dense"], record["kinds"]["routed"]
        saved = [routed["ratio"], *routed["ratio_95"], routed["ideal"], routed["of_ideal"], *routed["of_ideal_95"]]
        times[name] = [dense["ms"], routed["ms"], *saved]
    for page, exact in (("docs/evidence-text.md", emojis), (PAGES[1], times)):
        (table,) = re.findall(r"<!-- record: [\w/]+\.json -->\n((?:\|.*\n)+)", (ROOT / page).read_text())
        found = {row[0]: numbers(" ".join(row[1:])) for row in rows(table)[1:]}
        assert found.keys() == exact.keys()
        for name, said in found.items():
            assert len(said) == len(exact[name]) and all(map(is_rounded, said, exact[name])), name


def test_two_seeds_tell_no_chance_and_unlike_arms_have_unlike_colours():
    band = figures.chance(*gathered("selection_rate"), "kid")  # of convergence after 100,096 images, by hand:
    assert band == pytest.approx(0.0083614, rel=1e-4)
    study, results = gathered("selection_rate")
    other = {name: replace(arm, overrides=("dataset=cifar10",)) for name, arm in study.arms.items()}
    assert figures.chance(replace(study, arms=other), results, "kid") is None
    assert len({*figures.colours(gathered("recipe")[0]).values()}) == 10


def test_no_verdict_rests_on_fewer_than_three_seeds():
    """In the first table: a row that names one or two seeds says that it is no verdict."""
    text = (ROOT / PAGES[0]).read_text()
    first = rows(text[text.index("| question |") : text.index("Brackets hold")])[1:]
    assert len(first) >= 10
    for row in first:
        assert not re.search(r"\b(one|two) seeds?", row[3]) or "no verdict" in row[3], row
        assert "[" not in re.sub(r"\[[^\]]*\]\([^)]*\)", "", row[1]) or "three seeds" in row[3], row
    assert len(text.split()) <= 3_000
