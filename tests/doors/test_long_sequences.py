"""What benchmarks say of long sequences: where curves cross, against curves given as powers of the tokens; what is left
where memory does not suffice; that commands in JSON files name no folder of a machine.
"""

from __future__ import annotations

import json
import sys
from types import ModuleType

import matplotlib.figure
import pytest
import torch
from conftest import ROOT

LENGTHS = (256, 1024, 4096, 16384)


@pytest.fixture
def long_sequences(benchmark) -> ModuleType:
    return benchmark("long_sequences")


def test_crossing_points_of_powers(long_sequences):
    """a·N^p falls below b·N^q at N = (b/a)^(1/(p − q)), wherever that is."""
    for place in (300.0, 1024.5, 9000.0):
        said, found = long_sequences.crossing([(n, place**0.5, n**0.5) for n in LENGTHS])
        assert found == pytest.approx(place) and said == f"from about {float(f'{place:.2g}'):,.0f} tokens on"
    for first, said in ((1, "at all, from 256 tokens on"), (200, "not up to 16,384 tokens")):
        assert long_sequences.crossing([(n, first, n**0.5) for n in LENGTHS]) == (said, None)
    below_then_above_then_below = [(256, 1, 2), (1024, 2, 1), (4096, 1, 2)]
    assert long_sequences.crossing(below_then_above_then_below)[1] == pytest.approx(2048)
    assert long_sequences.crossing([]) == ("–", None)


@pytest.mark.slow
def test_what_fails_is_said_and_the_others_go_on(long_sequences, monkeypatch, tmp_path, capsys):
    """A kind whose second step lacks memory, others that no network can be; figure and table, of the file alone too."""
    small = ["model.hidden_size=16", "model.num_heads=2", "train.cpu_threads=1", "eval.points=16", "optim.lr=1e-4"]
    words = ["tokens=4,16", "rounds=1", "batch_tokens=8", f"out={tmp_path}/long.json", *small]
    steps, threads, taken, drawn = long_sequences.take_steps, torch.get_num_threads(), [], []

    def lacking(run, count):
        taken.append(run.cfg.model.architecture if run.cfg.train.routes_until is None else "")
        if taken.count("rwkv") > 1 and taken[-1] == "rwkv":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return steps(run, count)

    monkeypatch.setattr(long_sequences, "take_steps", lacking)
    monkeypatch.setattr(sys, "argv", ["benchmarks/long_sequences.py", *words])
    long_sequences.main()
    torch.set_num_threads(threads)
    printed, made = capsys.readouterr().out, json.loads((tmp_path / "long.json").read_text())
    assert [(row["tokens"], row["batch"], row["depth"], row["route"]) for row in made["rows"]] == [
        (4, 2, 4, [1, 2]),
        (16, 1, 4, [1, 2]),
    ]
    for row in made["rows"]:
        assert row["kinds"]["routed RWKV"] == {"failed": "out of memory"}
        assert "not a multiple of head_dim 64" in row["kinds"]["routed Mamba"]["failed"]
        ms, route = row["kinds"]["DiT"], row["kinds"]["TREAD"]
        assert ms["ms_per_1000"] == pytest.approx(1000 * ms["ms"] / row["batch"] / row["tokens"])
        assert (
            route["against"] == "DiT"
            and 1 < route["flops_ratio"] < 4 / 3
            and route["ratio"] == pytest.approx(ms["ms"] / route["ms"])
        )
    assert printed.count("| routed RWKV | out of memory |") == 2 and "4 blocks (in the place of S's 12)" in printed
    assert made["command"] == " ".join(["python benchmarks/long_sequences.py", *words[:3], "out=long.json", *small])

    savefig = matplotlib.figure.Figure.savefig
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda self, *args, **kw: drawn.append(self) or savefig(self, *args, **kw)
    )
    argv = ["benchmarks/long_sequences.py", f"from={tmp_path}/long.json", f"figure={tmp_path}/long.png"]
    monkeypatch.setattr(sys, "argv", argv)
    long_sequences.main()
    assert capsys.readouterr().out == printed and (tmp_path / "long.png").stat().st_size > 1000
    time = drawn[0].axes[0]
    assert [line.get_label() for line in time.lines if len(line.get_xdata()) == 2][:3] == ["DiT", "TREAD", "RWKV"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tokens=256,300"], "tokens has 300"),
        (["tokens=25"], "tokens has 25"),
        (["rounds=0"], "rounds is 0"),
        (["model=dit"], "is what this benchmark chooses"),
        (["modle.depth=3"], "the nearest known one is 'model.depth'"),
        (["model.depth=2"], "route start 1 lies behind route end 0"),
        (["from=nowhere.json"], "nowhere.json, which can't be read"),
    ],
)
def test_refusals_come_first(long_sequences, monkeypatch, words, said):
    monkeypatch.setattr(sys, "argv", ["benchmarks/long_sequences.py", *words])
    monkeypatch.setattr(long_sequences, "measure", lambda *_: pytest.fail("measured already"))
    with pytest.raises(ValueError, match=said):
        long_sequences.main()


def test_commands_name_no_folder_of_a_machine(benchmark, monkeypatch):
    words = [f"out={ROOT}/benchmarks/results/x.json", "figure=/somewhere/else/x.png", "from=made/x.json", "rounds=3"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/benchmarks/x.py", *words])
    told = "python benchmarks/x.py out=benchmarks/results/x.json figure=x.png from=made/x.json rounds=3"
    assert benchmark("timing").command() == told


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "out of memory"),
        (MemoryError("Unable to allocate 8 GiB"), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory"),
        (ValueError("\n no such kernel \nmore"), "ValueError: no such kernel"),
    ],
)
def test_failures_in_a_few_words(benchmark, error, said):
    assert benchmark("timing").why_failed(error) == said


@pytest.mark.slow
def test_linear_cost_says_what_there_is(benchmark, monkeypatch, capsys, tmp_path):
    """Memory of a pass is arithmetic for what saves all of its inputs: at least them, and linear in the tokens."""
    linear_cost = benchmark("linear_cost")
    words = ["width=32", "heads=2", "most=256", "rounds=1", f"out={tmp_path}/cost.json"]
    monkeypatch.setattr(sys, "argv", ["benchmarks/linear_cost.py", *words])
    linear_cost.main()
    printed, made = capsys.readouterr().out, json.loads((tmp_path / "cost.json").read_text())
    assert [row["tokens"] for row in made["rows"]] == [64, 256] and "Mamba block, MMAC" in printed
    for row in made["rows"]:
        assert row["ms"].keys() == row["mb"].keys() == {*linear_cost.COLUMNS} and not row["failed"]
        assert row["mmac"]["Mamba block"] > row["mmac"]["DiT block"] > 0
    for name in ("WKV", "SSD", "RWKV block", "Mamba block"):
        small, large = (row["mb"][name] for row in made["rows"])
        assert small == pytest.approx(large, rel=0.25), name
    assert str(tmp_path) not in json.dumps(made) and "largest ms over the smallest: attention" in printed
