"""The benchmarks' counts against published numbers and arithmetic by hand; their peak memory; the points where curves
cross, against powers of the tokens; and the rest of a measurement where a part fails.
"""

import json
import re
import sys
from types import SimpleNamespace

import matplotlib.figure
import pytest
import torch
from conftest import ROOT
from torch import nn

LENGTHS = (256, 1024, 4096, 16384)


@pytest.fixture
def launched(benchmark, monkeypatch, capsys):
    """A function from a benchmark's name and its arguments to what it prints."""
    threads = torch.get_num_threads()

    def launch(name: str, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py", *words])
        benchmark(name).main()
        return capsys.readouterr().out

    yield launch
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_costs_of_the_rivals(benchmark):
    """Published parameters; a block's multiply-adds by hand, N·12·D² + 2·N²·D and 6·D² of its modulation."""
    flops = benchmark("flops")
    masked = {"s2": (384, 12, 68.12), "b2": (768, 12, 175.58), "l2": (1024, 24, 509.78), "xl2": (1152, 28, 730.12)}

    def block(width: int, tokens: int, conditioning: int) -> int:
        return tokens * 12 * width**2 + 2 * tokens**2 * width + 6 * width * conditioning

    for size, (D, depth, millions) in masked.items():
        costs = {name: flops.cost(f"experiment=imagenet256_{size}", f"model={name}") for name in flops.MODELS}
        parameters, training, sampling = ({name: cost[place] for name, cost in costs.items()} for place in (1, 2, 3))
        assert (parameters["maskdit"] - D) / 1e6 == pytest.approx(millions, abs=0.005)  # without the null row
        saved = {name: sampling[name] - training[name] for name in costs}
        half, quarter = (block(D, 256, D) - block(D, tokens, D) for tokens in (128, 64))
        assert saved["dit"] == 0 and saved["tread"] == (depth - 5) * half and saved["sprint"] == (depth - 4) * quarter
        assert saved["maskdit"] == depth * half + 128 * D * 512  # and the layer into the decoder
        assert sampling["sprint"] - sampling["dit"] == 256 * 2 * D * D
        # the decoder sees all tokens in training too; into it and out of it, where DiT's last layer is D wide
        decoder = 8 * block(512, 256, D) + 256 * (D * 512 + (512 - D) * 16) + 2 * D * 512
        assert sampling["maskdit"] - sampling["dit"] == decoder
        assert (training["maskdit"] < training["dit"]) == (size != "s2")  # what TREAD's paper says
    assert [round(parameters[name] / 1e6) for name in ("dit", "tread", "maskdit")] == [675, 675, 730]  # its Table S7


def test_peak_memory_is_of_one_run(benchmark, monkeypatch):
    """Its own tensors and the most of the work: 8 MB at once of 12 MB, while another 40 MB are there."""
    timing = benchmark("timing")
    monkeypatch.setattr(timing, "DEVICE", torch.device("cpu"))
    network, average, others = nn.Linear(999, 1000), nn.Linear(999, 1000), torch.zeros(10_000_000)
    optimizer = SimpleNamespace(state={0: {"moment": torch.zeros(500_000), "step": 1}})
    run = SimpleNamespace(wrapped=network, ema=SimpleNamespace(network=average), optimizer=optimizer)

    def work():
        first, second = torch.zeros(1_000_000), torch.zeros(1_000_000)
        del first
        return torch.zeros(900_000) + second[0]

    turns = timing.take_turns({"work": work}, 3)["work"]
    assert len(turns.seconds) == 3 and len(others)
    peak = benchmark("step_time").held_by(run) + turns.held
    assert peak == pytest.approx((4 + 4 + 2 + 4 + 2 * 3.6) * 1e6, abs=1e4)


@pytest.mark.slow
def test_step_time_of_models_side_by_side(launched, tmp_path):
    """The stages are of the whole step: 100% together, up to rounding of six figures. MaskDiT's memory is that of its
    decoder, and its ratio to the others small as FLOPs allow.
    """
    words = ["dataset=digits", "model=tread", "beside=maskdit", "model.hidden_size=64", "model.num_heads=2"]
    words += ["model.depth=6", "train.batch_size=2", "train.cpu_threads=1", "pairs=6", f"out={tmp_path}/made/step.json"]
    printed = launched("step_time", *words)
    made = json.loads((tmp_path / "made/step.json").read_text())
    assert made["command"] == " ".join(["python", "benchmarks/step_time.py", *words[:-1], "out=step.json"])
    dense, routed, masked = (made["kinds"][name] for name in ("dense", "routed", "maskdit"))
    assert masked["ideal"] < 0.2 and masked["ratio"] < 1 < routed["ideal"]
    assert masked["peak_gb"] > 16 * 30e6 / 1e9 > 10 * dense["peak_gb"]
    for kind in made["kinds"]:
        shares = re.findall(r"([\d.]+)%", re.search(rf"^{kind}: data wait.*$", printed, re.M)[0])
        assert len(shares) == 6 and abs(sum(map(float, shares)) - 100) < 0.4


def test_crossing_points_of_powers(benchmark):
    """a·N^p falls below b·N^q at N = (b/a)^(1/(p − q)), wherever that is."""
    crossing = benchmark("long_sequences").crossing
    for place in (300.0, 1024.5, 9000.0):
        said, found = crossing([(n, place**0.5, n**0.5) for n in LENGTHS])
        assert found == pytest.approx(place) and said == f"from about {float(f'{place:.2g}'):,.0f} tokens on"
    for first, said in ((1, "at all, from 256 tokens on"), (200, "not up to 16,384 tokens")):
        assert crossing([(n, first, n**0.5) for n in LENGTHS]) == (said, None)
    below_then_above_then_below = [(256, 1, 2), (1024, 2, 1), (4096, 1, 2)]
    assert crossing(below_then_above_then_below)[1] == pytest.approx(2048)
    assert crossing([]) == ("–", None)


@pytest.mark.slow
def test_what_fails_is_said_and_the_others_go_on(launched, benchmark, monkeypatch, tmp_path):
    """A kind whose second step lacks memory, others that no network can be; figure and table, of the file alone too."""
    small = ["model.hidden_size=16", "model.num_heads=2", "train.cpu_threads=1", "eval.points=16", "optim.lr=1e-4"]
    words = ["tokens=[4,16]", "rounds=1", "batch_tokens=8", f"out={tmp_path}/long.json", *small]
    step_time, taken, drawn = benchmark("step_time"), [], []
    steps = step_time.take_steps

    def lacking(run, cfg, count):
        taken.append(cfg.model.architecture if cfg.train.routes_until is None else "")
        if taken.count("rwkv") > 1 and taken[-1] == "rwkv":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return steps(run, cfg, count)

    monkeypatch.setattr(step_time, "take_steps", lacking)
    printed, made = launched("long_sequences", *words), json.loads((tmp_path / "long.json").read_text())
    shapes = [(row["tokens"], row["batch"], row["depth"], row["route"]) for row in made["rows"]]
    assert shapes == [(4, 2, 4, [1, 2]), (16, 1, 4, [1, 2])]
    for row in made["rows"]:
        assert row["kinds"]["routed RWKV"] == {"failed": "out of memory"}
        assert "not a multiple of head_dim 64" in row["kinds"]["routed Mamba"]["failed"]
        ms, route = row["kinds"]["DiT"], row["kinds"]["TREAD"]
        assert ms["ms_per_1000"] == pytest.approx(1000 * ms["ms"] / row["batch"] / row["tokens"])
        assert route["against"] == "DiT" and 1 < route["flops_ratio"] < 4 / 3
        assert route["ratio"] == pytest.approx(ms["ms"] / route["ms"])
    assert printed.count("| routed RWKV | out of memory |") == 2

    savefig = matplotlib.figure.Figure.savefig
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda self, *args, **kw: drawn.append(self) or savefig(self, *args, **kw)
    )
    assert launched("long_sequences", f"from={tmp_path}/long.json", f"figure={tmp_path}/long.png") == printed
    assert (tmp_path / "long.png").stat().st_size > 1000
    lines = [line.get_label() for line in drawn[0].axes[0].lines if len(line.get_xdata()) == 2]
    assert lines[:3] == ["DiT", "TREAD", "RWKV"]


def test_the_published_lengths_are_read(launched):
    """docs/measurements.md has these numbers."""
    printed = launched("long_sequences", f"from={ROOT}/benchmarks/results/long_sequences_cpu.json")
    assert "| 1.58 than DiT (1.55..1.63) | 1.56 |" in printed


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("long_sequences", ["tokens=[256,300]"], "tokens has 300"),
        ("linear_cost", ["128"], "'128' is no option"),
        ("long_sequences", ["model=dit"], "is what this benchmark chooses"),
        ("long_sequences", ["modle.depth=3"], "the nearest known one is 'model.depth'"),
        ("long_sequences", ["model.depth=2"], "route start 1 lies behind route end 0"),
        ("step_time", ["pairs=3"], "pairs is 3"),
        ("step_time", ["out=made/"], "made/ could not be written: it names a folder"),
        ("linear_cost", ["width=100"], "width is 100"),
    ],
)
def test_refusals_come_first(launched, benchmark, monkeypatch, name, words, said):
    monkeypatch.setattr(benchmark("timing"), "seconds", lambda *_: pytest.fail("measured already"))
    with pytest.raises((ValueError, OSError), match=said):
        launched(name, *words)


def test_commands_name_no_folder_of_a_machine(benchmark, monkeypatch):
    words = [f"out={ROOT}/benchmarks/results/x.json", "figure=/somewhere/else/x.png", "from=made/x.json", "rounds=3"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/benchmarks/x.py", *words])
    told = "python benchmarks/x.py out=benchmarks/results/x.json figure=x.png from=made/x.json rounds=3"
    assert benchmark("timing").command() == told


def test_failures_in_a_few_words(benchmark):
    for error, said in (
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory"),
        (ValueError("\n no such kernel \nmore"), "ValueError: no such kernel"),
    ):
        assert benchmark("timing").why_failed(error) == said


@pytest.mark.slow
def test_linear_cost_says_what_there_is(launched, benchmark, tmp_path):
    """Memory of a pass is arithmetic for what saves all of its inputs: at least them, and linear in the tokens."""
    words = ["width=32", "heads=2", "most=256", "rounds=1", f"out={tmp_path}/cost.json"]
    printed, made = launched("linear_cost", *words), json.loads((tmp_path / "cost.json").read_text())
    assert [row["tokens"] for row in made["rows"]] == [64, 256] and "Mamba block, MMAC" in printed
    for row in made["rows"]:
        assert row["ms"].keys() == row["mb"].keys() == {*benchmark("linear_cost").COLUMNS} and not row["failed"]
        assert row["mmac"]["Mamba block"] > row["mmac"]["DiT block"] > 0
    for name in ("WKV", "SSD", "RWKV block", "Mamba block"):
        small, large = (row["mb"][name] for row in made["rows"])
        assert small == pytest.approx(large, rel=0.25), name
    assert str(tmp_path) not in json.dumps(made) and "largest ms over the smallest: attention" in printed
