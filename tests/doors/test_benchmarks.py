"""The benchmarks' counts against published numbers and arithmetic by hand, their peak memory, and what a part that
fails costs the others."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from torch import nn


@pytest.fixture
def launched(import_benchmark, monkeypatch, capsys):
    """A function from a benchmark's name and its arguments to what it prints."""
    threads = torch.get_num_threads()

    def launch(name: str, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py", *words])
        import_benchmark(name).main()
        return capsys.readouterr().out

    yield launch
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_costs_of_the_rivals(import_benchmark):
    """Published parameters; a block's multiply-adds by hand, N·12·D² + 2·N²·D and 6·D² of its modulation."""
    flops = import_benchmark("flops")
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


def test_peak_memory_is_of_one_run(import_benchmark, monkeypatch):
    """Its own tensors and the most of the work: 8 MB at once of 12 MB, while another 40 MB are there."""
    timing = import_benchmark("timing")
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
    peak = import_benchmark("step_time").held_by(run) + turns.held
    assert peak == pytest.approx((4 + 4 + 2 + 4 + 2 * 3.6) * 1e6, abs=1e4)


@pytest.mark.slow
def test_step_time_of_models_side_by_side(launched, tmp_path):
    """The stages are of the whole step: 100% together, up to rounding of six figures. FLOPs allow little by a route
    over one of six blocks, and nearly twice by MaskDiT, whose encoder sees half of the tokens."""
    words = ["dataset=digits", "model=tread", "beside=maskdit", "model.hidden_size=64", "model.num_heads=2"]
    words += ["model.depth=6", "train.batch_size=2", "train.cpu_threads=1", "pairs=6", f"out={tmp_path}/made/step.json"]
    printed = launched("step_time", *words)
    made = json.loads((tmp_path / "made/step.json").read_text())
    assert made["command"] == " ".join(["python", "benchmarks/step_time.py", *words[:-1], "out=step.json"])
    dense, routed, masked = (made["kinds"][name] for name in ("dense", "routed", "maskdit"))
    assert 1 < routed["ideal"] < 1.2 and 1.5 < masked["ideal"] < 2
    assert masked["of_ideal"] == pytest.approx(masked["ratio"] / masked["ideal"])
    assert dense["peak_gb"] > 16 * made["parameters"] / 1e9  # weights, average and AdamW's two moments, in fp32
    for kind in made["kinds"]:
        shares = re.findall(r"([\d.]+)%", re.search(rf"^{kind}: data wait.*$", printed, re.M)[0])
        assert len(shares) == 6 and abs(sum(map(float, shares)) - 100) < 0.4


def test_models_beside_train_by_the_same_overrides(launched, import_benchmark, monkeypatch):
    """But for an architecture's own, such as MaskDiT's decoder: the others have no such setting."""
    step_time, seen = import_benchmark("step_time"), {}
    monkeypatch.setattr(step_time, "measure", lambda kinds, pairs: seen.update(kinds))
    monkeypatch.setattr(step_time, "show", lambda result: None)
    words = ["dataset=digits", "model=tread", "beside=maskdit,dit", "model.hidden_size=64", "model.num_heads=2"]
    launched("step_time", *words, "model.depth=6", "train.batch_size=2", "model.mlp_ratio=2")
    assert [*seen] == ["dense", "routed", "maskdit", "dit"]
    assert {(cfg.model.hidden_size, cfg.model.mlp_ratio) for _, cfg in seen.values()} == {(64, 2.0)}


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("step_time", ["128"], "'128' is no option"),
        ("step_time", ["-pairs=8"], "'-pairs=8' is no option"),
        ("step_time", ["modle.depth=3"], "the nearest known one is 'model.depth'"),
        ("step_time", ["experiment=tiny"], "random data needs dataset.channels, dataset.size and dataset.num_classes"),
        ("step_time", ["model=dit"], "has no routes to compare"),
        ("step_time", ["pairs=3"], "pairs is 3"),
        ("step_time", ["out=made/"], "made/ could not be written: it names a folder"),
    ],
)
def test_refusals_come_first(launched, import_benchmark, monkeypatch, name, words, said):
    monkeypatch.setattr(import_benchmark("timing"), "seconds", lambda *_: pytest.fail("measured already"))
    with pytest.raises((ValueError, OSError), match=said):
        launched(name, *words)


def test_commands_name_no_folder_of_a_machine(import_benchmark, monkeypatch):
    words = [f"out={ROOT}/benchmarks/results/x.json", "figure=/somewhere/else/x.png", "from=made/x.json", "rounds=3"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/benchmarks/x.py", *words])
    told = "python benchmarks/x.py out=benchmarks/results/x.json figure=x.png from=made/x.json rounds=3"
    assert import_benchmark("timing").command() == told


def test_failures_in_a_few_words(import_benchmark):
    for error, said in (
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory"),
        (ValueError("\n no such kernel \nmore"), "ValueError: no such kernel"),
    ):
        assert import_benchmark("timing").why_failed(error) == said


def test_a_call_that_fails_costs_the_others_nothing(import_benchmark):
    calls, failed = [], {}

    def second_time():
        calls.append(1)
        if len(calls) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    turns = import_benchmark("timing").take_turns({"first": lambda: None, "second": second_time}, 3, failed)
    assert failed == {"second": "out of memory"} and len(turns.pop("first").seconds) == 3 and not turns


def test_a_part_records_what_fails_and_ends_within_its_minutes(import_benchmark, tmp_path):
    gpu_check, path = import_benchmark("gpu_check"), tmp_path / "gpu.json"
    for minutes, rows in (
        (1, {"copy": {"failed": "ModuleNotFoundError: No module named 'nothing'"}, "speed": {"measured": 2.0}}),
        (0, {name: {"failed": "the 0 minutes of this part are over"} for name in ("copy", "speed")}),
    ):
        result = {"machine": {"rows": {}}, "host": "kept"}
        check = gpu_check.Check("machine", minutes, path, result, gpu_check.Options())
        check.attempt("copy", lambda: __import__("nothing"))
        check.attempt("speed", lambda check=check: check.add("speed", 2.0, "GB/s"))
        written = json.loads(path.read_text())
        assert written["host"] == "kept" and written["machine"]["rows"].keys() == rows.keys()
        assert all(written["machine"]["rows"][name].items() >= row.items() for name, row in rows.items())


@pytest.mark.parametrize("sizes, kept", [(["sizes=[XL]"], {"S, dense": "first"}), ([], {})])
def test_with_sizes_a_part_keeps_the_other_sizes_numbers(import_benchmark, tmp_path, monkeypatch, sizes, kept):
    gpu_check, path = import_benchmark("gpu_check"), tmp_path / "gpu.json"
    rows = {"S, dense": {"measured": 1.0}, "XL, dense": {"failed": "out of memory"}, "XL": {"measured": 1.0}}
    path.write_text(json.dumps({"steps": {"commit": "first", "rows": rows}}))

    def steps(check):
        """A part."""
        check.add("XL", 2.0, "images/s")

    monkeypatch.setattr(gpu_check, "PARTS", {steps: (1, "nothing")})
    monkeypatch.setattr(gpu_check, "steps", steps)
    monkeypatch.setattr("sys.argv", ["gpu_check.py", f"out={path}", *sizes])
    gpu_check.main()
    rows = json.loads(path.read_text())["steps"]["rows"]
    assert {name: row["commit"] for name, row in rows.items() if "commit" in row} == kept
    assert rows["XL"]["measured"] == 2.0 and len(rows) == 1 + len(kept)


def test_kernels_have_their_kinds(import_benchmark):
    """Names as CUPTI gives them on an H100."""
    for name, kind in {
        "triton_poi_fused__to_copy_add_mul_2": "memory-bound",
        "triton_per_fused_add_native_layer_norm_0": "reduction",
        "nvjet_tst_192x192_64x3_2x1_v_bz_coopB_TNT": "product",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n": "product",
        "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm>": "product",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma": "attention",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_kernel": "attention",
        "multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor>": "optimizer",
        "multi_tensor_apply_kernel<TensorListMetadata<2>, TernaryOpScalarListFunctor<float>>": "average",
        "void at::native::vectorized_gather_kernel<16, long>": "gather",
        "Memcpy DtoD (Device -> Device)": "copy",
        "void at::native::vectorized_elementwise_kernel<4, at::native::AUnaryFunctor>": "memory-bound",
    }.items():
        assert import_benchmark("gpu_check").kernel_kind(name) == kind


@pytest.mark.slow
def test_every_part_of_gpu_check_runs_tiny_on_a_cpu(tmp_path):
    """Each has numbers; what has none states why: no fused scan here, and backends of attention for GPUs."""
    words = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), "--cpu", f"out={tmp_path}/gpu.json"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = json.loads((tmp_path / "gpu.json").read_text())
    assert [*made] == ["machine", "host", "steps", "variants", "peers", "kinds", "sampling"]
    for part, content in made.items():
        failed = {name for name, row in content["rows"].items() if "failed" in row}
        assert len(content["rows"]) > len(failed), part
        assert all(re.search("cuDNN|memory-efficient|mamba_ssm|DINOv2", name) for name in failed), failed
