"""What benchmarks/rivals.py counts, against published numbers and arithmetic by hand, and how it measures memory."""

from __future__ import annotations

import json
import os
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import ROOT
from forked import run_python
from torch import nn

WIDTHS = {"S": (384, 12, 6), "B": (768, 12, 12), "L": (1024, 24, 16), "XL": (1152, 28, 16)}  # width, blocks, heads


@pytest.fixture
def rivals(benchmark) -> ModuleType:
    return benchmark("rivals")


@pytest.mark.slow
def test_counted_rows(rivals):
    """Published parameters; a block's multiply-adds by hand, N·12·D² + 2·N²·D and 6·D² of its modulation."""
    rows = {(row.size, row.model): row for row in rivals.rows()}
    masked = {"S": 68.12, "B": 175.58, "L": 509.78, "XL": 730.12}  # without the null row, of 0.001 M at most
    for (size, model), row in rows.items():
        if model == "MaskDiT":
            assert row.parameters - WIDTHS[size][0] / 1e6 == pytest.approx(masked[size], abs=0.005)
    table_s7 = {"DiT": 675, "TREAD": 675, "MaskDiT": 730, "SD-DiT": 740}
    assert {model: round(rows["XL", model].parameters) for model in table_s7} == table_s7

    def block(width: int, tokens: int, conditioning: int) -> int:
        return tokens * 12 * width**2 + 2 * tokens**2 * width + 6 * width * conditioning

    for size, (D, depth, _) in WIDTHS.items():
        parts = {name: rows[size, name] for name in ("DiT", "TREAD", "MaskDiT", "SPRINT")}
        saved = {name: parts[name].sampling - parts[name].training for name in parts}
        half, quarter = (block(D, 256, D) - block(D, tokens, D) for tokens in (128, 64))
        assert saved["DiT"] == 0 and saved["TREAD"] == (depth - 5) * half and saved["SPRINT"] == (depth - 4) * quarter
        assert saved["MaskDiT"] == depth * half + 128 * D * 512  # and the layer into the decoder
        assert parts["SPRINT"].sampling - parts["DiT"].sampling == 256 * 2 * D * D
        # the decoder sees all tokens in training too; into it and out of it, where DiT's last layer is D wide
        decoder = 8 * block(512, 256, D) + 256 * (D * 512 + (512 - D) * 16) + 2 * D * 512
        assert parts["MaskDiT"].sampling - parts["DiT"].sampling == decoder
        fewer = parts["MaskDiT"].training < parts["DiT"].training
        assert fewer == (size != "S")  # what the paper says of a decoder of fixed size


def test_parameters_of_mdt_follow_from_its_architecture(rivals):
    """A block more than DiT (with variances), learned positions in encoder and decoder, a mask token, a bias of 31²
    places a head in each block; of MDTv2, of whose L nothing is stated, a layer 2D→D for each long skip.
    """
    mdt, v2 = rivals.LISTED["MDT"][0], rivals.LISTED["MDTv2"][0]
    skips = {"S": 3 + 6, "B": 4 + 4, "XL": 12 + 4}  # half of the encoder's blocks, and all of the decoder's
    assert mdt.keys() == WIDTHS.keys() and v2.keys() == skips.keys()
    for size, (D, depth, heads) in WIDTHS.items():
        block = 12 * D**2 + 9 * D + 6 * D**2 + 6 * D
        dit = depth * block + 17 * D + (256 + 1) * D + D**2 + D + 1001 * D + 2 * D**2 + 2 * D + (D + 1) * 32
        first = dit + block + 2 * 256 * D + D + (depth + 1) * heads * 31**2
        assert mdt[size] == pytest.approx(first / 1e6, abs=0.06)
        if size in v2:
            assert v2[size] == pytest.approx((first + skips[size] * (2 * D * D + D)) / 1e6, abs=0.06)
    assert rivals.LISTED["SD-DiT"][0] == {"XL": 740} and "not derivable" in rivals.LISTED["SD-DiT"][1]


def test_peak_memory_is_of_one_run(benchmark):
    """Its own tensors and the most of the work: 8 MB at once of 12 MB, while another 40 MB are there."""
    network, average, others = nn.Linear(999, 1000), nn.Linear(999, 1000), torch.zeros(10_000_000)
    processes, state = SimpleNamespace(device=torch.device("cpu")), {0: {"moment": torch.zeros(500_000), "step": 1}}
    optimizer, ema = SimpleNamespace(state=state), SimpleNamespace(network=average)
    run = SimpleNamespace(processes=processes, network=network, wrapped=network, ema=ema, optimizer=optimizer)

    def work():
        first, second = torch.zeros(1_000_000), torch.zeros(1_000_000)
        del first
        return torch.zeros(900_000) + second[0]

    peak = benchmark("step_time").peak_memory(run, work)
    assert peak == pytest.approx((4 + 4 + 2 + 4 + 2 * 3.6) / 1e3, abs=1e-5) and len(others)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["time=S,M"], "time names M, but the sizes are S, B, L, XL"),
        (["time=S,B", "batch=16,x"], "batch is 16,x"),
        (["time=S,B,L", "batch=16,8"], "one for each size"),
        (["time=S,B", "batch=16,8,4"], "one for each size"),
        (["time=S,B", "batch=16,0"], "batch is 16,0"),
        (["time=S", "pairs=3"], "pairs is 3"),
        (["tiem=S"], "the nearest known one is"),
    ],
)
def test_refusals_come_first(rivals, monkeypatch, words, said):
    monkeypatch.setattr(sys, "argv", ["benchmarks/rivals.py", *words])
    monkeypatch.setattr(rivals, "rows", lambda: pytest.fail("counted already"))
    with pytest.raises(ValueError, match=re.escape(said)):
        rivals.main()


@pytest.mark.slow
def test_four_models_take_turns(rivals, monkeypatch, tmp_path, capsys):
    """Tiny ones: what FLOPs allow is arithmetic, and MaskDiT's memory is that of its decoder."""
    small = ["model.depth=6", "model.hidden_size=64", "model.num_heads=2", "dataset.size=8", "train.cpu_threads=1"]
    words = ["time=S", "batch=2", f"out={tmp_path}/made/rivals.json", *small]
    monkeypatch.setattr(sys, "argv", ["benchmarks/rivals.py", *words])
    threads = torch.get_num_threads()
    rivals.main()
    torch.set_num_threads(threads)
    made = json.loads((tmp_path / "made/rivals.json").read_text())
    kinds = made["timed"]["S"]["kinds"]
    assert [*kinds] == ["DiT", "TREAD", "MaskDiT", "SPRINT"] and len(made["counted"]) == 24
    told = ["out=rivals.json" if word.startswith("out=") else word for word in words]  # no folder of this machine
    assert made["timed"]["S"]["command"] == " ".join(["python", "benchmarks/rivals.py", *told])
    assert kinds["MaskDiT"]["ideal"] < 0.1 and kinds["MaskDiT"]["ratio"] < 1 < kinds["SPRINT"]["ideal"]
    assert kinds["MaskDiT"]["peak_gb"] > 16 * 30e6 / 1e9 > 10 * kinds["DiT"]["peak_gb"]
    printed = capsys.readouterr().out
    assert printed.count("| S | MaskDiT |") == 2 and "FLOPs allow" in printed


@pytest.mark.slow
def test_step_time_divides_a_step_into_its_stages(tmp_path):
    """The shares are of the whole step: together they are 100%, up to rounding of six figures."""
    words = ("dataset=digits", "model.hidden_size=32", "model.depth=6", "train.batch_size=8", "pairs=6")
    done = run_python(
        ROOT / "benchmarks/step_time.py", *words, cwd=tmp_path, environment={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    for kind in ("dense", "routed"):
        shares = re.findall(r"([\d.]+)%", re.search(rf"^{kind}: data wait.*$", done.stdout, re.M)[0])
        assert len(shares) == 6 and abs(sum(map(float, shares)) - 100) < 0.4
