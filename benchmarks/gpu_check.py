"""Measures where the time of training and sampling goes on a GPU: python benchmarks/gpu_check.py part=steps [options]

Seven parts measure why a step is slower than its FLOPs would allow. A part begins no further measurement after its
time limit. Each number is printed, next to any prediction, and written at once to a file that all parts share.
If a measurement fails, or lacks memory or a package, the reason is recorded and the next measurement follows.

    part=…     null: all in this order: machine (limits of the device), host (time to launch kernels), steps (with and
               without token routes), variants (other torch settings), peers (diffusers' DiT), kinds (other networks),
               sampling (network, decoder and DINOv2)
    sizes=…    DiT sizes for steps, variants and peers, such as [XL,S]. The file's numbers for these sizes are replaced;
               others stay, with their commit and time. null: the part's own sizes; all of its numbers are replaced
    pairs=6    number of rounds; each round times every function of a comparison once
    --cpu      run everything in tiny sizes on a CPU, as a rehearsal
    out=…      the file; null: benchmarks/results/gpu_<device>.json, but no file on a CPU

python benchmarks/gpu_check.py --cpu
python benchmarks/gpu_check.py part=steps sizes=[XL,S]
"""

if __name__ == "__main__":
    import checkout  # noqa: F401

import contextlib
import copy
import gc
import json
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from step_time import BLOCK, Kinds, calls_of, kinds_of, measure, open_run, stages, take_steps
from timing import CPU, DEVICE, ROOT, Turns, begin, circumstances, options_of, take_turns, why_failed
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from routing_module import gather_tokens
from tread.diffusion.edm import EDM
from tread.diffusion.sampling import Model, Sampler, draw
from tread.models.backbone import count_parameters
from tread.models.cost_constants import SIZES
from tread.runtime.compiling import compile_blocks
from tread.runtime.device import autocast, device_name, set_tf32, wait_for
from tread.runtime.files import check_file, write_json
from tread.runtime.schema import Count
from tread.training.costs import memory
from tread.training.draws import active_routes
from tread.training.run import Run
from tread.training.settings import Settings

PREDICTED_STEPS = {  # GPU → size → images/s of dense, of routed steps (Route.fp32 "off"), and their ratio, at batch 256
    "H200": {"S": (5800, 8000, 1.37), "B": (2400, 3350, 1.40), "L": (815, 1345, 1.65), "XL": (570, 980, 1.71)},
    "H100": {"S": (5100, 7000, 1.37), "B": (2100, 2950, 1.40), "L": (730, 1180, 1.65), "XL": (515, 875, 1.71)},
}
OTHERS = {  # other networks at B's size → predicted time of their step divided by DiT's
    "lightning": 1.1,
    "dit_text": 1.3,
    "maskdit": 0.95,
    "sprint": 0.55,
    "rwkv": 1.8,
    "mamba": 4.0,
    "mamba model.kernel=mamba_ssm": 2.0,
}
KERNELS = (  # kind of GPU kernel, and a regular expression for its name; the first match counts
    ("memory-bound", "triton_poi"),
    ("reduction", "triton_red|triton_per"),
    ("attention", "flash|fmha|sdpa|attention"),
    ("average", "lerp|ternaryop|fusedsgd"),
    ("optimizer", "adam|multi_tensor"),
    ("gather", "gather|scatter|index"),
    ("copy", "memcpy|memset|copy"),
    ("product", "gemm|cutlass|nvjet|cublas|xmma|triton_tem|addmm|aten::mm|bmm|conv"),
    ("reduction", "reduce|norm|sum"),
    ("memory-bound", ""),
)
Called = tuple[nn.Module, tuple[Tensor, ...]]  # a network and its inputs


@dataclass(frozen=True)
class Options:
    part: Literal["machine", "host", "steps", "variants", "peers", "kinds", "sampling"] | None = None
    sizes: tuple[Literal["S", "B", "L", "XL"], ...] | None = None
    pairs: Count = 6
    out: str | None = None


@dataclass
class Check:
    """Takes and records the measurements of one `part` of this script; none begins after its `minutes` are over.

    path     the JSON file, rewritten after each measurement; None: measurements are only printed.
    result   the content of that file: {part: {"rows": {name: measurement}, and facts such as the commit}}.
    options  those of the command line.
    """

    part: str
    minutes: float
    path: Path | None
    result: dict
    options: Options
    began: float = field(default_factory=time.perf_counter)

    def add(self, name: str, measured: float, unit: str, predicted: float | None = None, **more: object) -> None:
        """Record a number, with further facts `more` for the JSON, and print it next to its prediction, if any."""
        predicted = None if CPU else predicted
        expected = "" if predicted is None else f"  (predicted {predicted:,.4g})"
        print(f"  {name:<52} {measured:>12,.4g} {unit}{expected}", flush=True)
        self._write(name, {"measured": measured, "unit": unit, "predicted": predicted, **more})

    def fail(self, name: str, reason: str) -> None:
        print(f"  {name:<52} not measured: {reason}", flush=True)
        self._write(name, {"failed": reason})

    def attempt(self, name: str, work: Callable[[], None]) -> None:
        """Run the measurements in `work`, or record under `name` why they failed or that the part's time is over."""
        if time.perf_counter() - self.began > 60 * self.minutes:
            return self.fail(name, f"the {self.minutes:g} minutes of this part are over")
        try:
            work()
        except Exception as error:  # memory, kernels, compilers and missing packages fail in many ways
            self.fail(name, why_failed(error))
        gc.collect()  # a run and its CUDA graphs refer to each other
        torch.cuda.empty_cache()

    def turns(self, calls: dict[str, Callable[[], object]]) -> dict[str, Turns]:
        """Time the functions in `calls` {name: function}, each once a round, for options.pairs rounds (see take_turns).
        Returns {name: times and memory} of those that worked, and records why others failed."""
        failed: dict[str, str] = {}
        turns = take_turns(calls, self.options.pairs, failed)
        for name, reason in failed.items():
            self.fail(name, reason)
        return turns

    @property
    def rows(self) -> dict[str, dict]:
        return self.result[self.part]["rows"]

    def _write(self, name: str, row: dict) -> None:
        self.rows[name] = row
        if self.path:
            write_json(self.path, self.result)


def repeated(function: Callable[[], object], times: int) -> Callable[[], None]:
    """Return a function that calls `function` `times` times, to time GPU work that is shorter than its launch."""

    def call() -> None:
        for _ in range(times):
            function()

    return call


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.float32 if CPU else torch.bfloat16)


def machine(check: Check) -> None:
    """Measure the device's limits: the speed of copies, of each DiT size's matrix products, and of attention backends.
    The speeds show which backend suits which shape, and what a step could gain by fusing memory-bound operations."""
    times, batch = (1, 2) if CPU else (20, 256)

    def copies() -> None:
        source = torch.zeros(2**24 if CPU else 2**30, dtype=torch.uint8, device=DEVICE)
        target = torch.empty_like(source)
        for name, turn in check.turns({"copy": repeated(lambda: target.copy_(source), times)}).items():
            check.add(f"{name}, read and written", 2 * times * source.nbytes / turn.median / 1e9, "GB/s")

    def products(size: str) -> None:
        width, rows = SIZES[size] // (8 if CPU else 1), 256 * batch
        x, weight, gradient = random(rows, width), random(4 * width, width), random(rows, 4 * width)
        calls = {
            f"products of {size}, forward": lambda: x @ weight.T,
            f"products of {size}, inputs' gradients": lambda: gradient @ weight,
            f"products of {size}, weights' gradients": lambda: gradient.T @ x,
        }
        for name, turn in check.turns({name: repeated(call, times) for name, call in calls.items()}).items():
            check.add(name, times * 2 * rows * width * 4 * width / turn.median / 1e12, "TFLOP/s")

    check.attempt("copy", copies)
    for size in SIZES:
        check.attempt(f"products of {size}", partial(products, size))
    for width, tokens, words in [*((w, n, 0) for n in (256, 128) for w in (64, 72)), (64, 256, 64), (64, 256, 77)]:
        name = f"attention, heads of {width}, {tokens} tokens" + f" to {words} words, masked" * bool(words)
        check.attempt(name, partial(attention, check, name, (batch, tokens, words, width), times))


def attention(check: Check, name: str, shape: tuple[int, int, int, int], times: int) -> None:
    """Time attention's forward and backward pass with each backend, and compare gradients with plain fp32 attention's.

    shape  (samples, tokens, words, head width). Tokens attend to `words` text tokens or, if that is 0, to each other.
    times  the number of calls in one measurement.
    """
    batch, tokens, words, width = shape
    q, k, v = (random(batch, 16, count, width).requires_grad_() for count in (tokens, words or tokens, words or tokens))
    lengths = torch.randint(4, max(words, 5), (batch, 1), device=DEVICE)
    mask = (torch.arange(words, device=DEVICE) < lengths)[:, None, None] if words else None
    direction = torch.randn_like(q)

    def gradients(backend: SDPBackend, *inputs: Tensor) -> tuple[Tensor, ...]:
        with sdpa_kernel(backend):
            output = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
            return torch.autograd.grad(output, inputs, direction.to(output))

    exact = gradients(SDPBackend.MATH, *(tensor.float().detach().requires_grad_() for tensor in (q, k, v)))
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    backends |= {"memory-efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
    backends = {f"{name}, {called}": backend for called, backend in backends.items()}
    calls = {called: repeated(partial(gradients, backend, q, k, v), times) for called, backend in backends.items()}
    for called, turn in check.turns(calls).items():
        found = gradients(backends[called], q, k, v)
        error = max(float((a.float() - b).norm() / b.norm()) for a, b in zip(found, exact))
        speed = 12 * batch * 16 * tokens * (words or tokens) * width * times / turn.median / 1e12
        check.add(called, 1e3 * turn.median / times, "ms", gradient_error=error, tflops=speed)


def words_of(size: str, *more: str, images: int = 256) -> list[str]:
    """Return train.py overrides: a routed DiT of `size` ("S" to "XL", tiny on a CPU), `images` a step, and `more`."""
    tiny = ["model.hidden_size=32", "model.num_heads=2", "model.depth=3", "dataset.size=8", "train.batch_size=2"]
    tiny += ["model.routes=[{start: 1, end: 1}]"]
    words = [f"experiment=imagenet256_{size.lower()}2", "model=tread"]
    return [*words, *(tiny if CPU else [f"train.batch_size={images}"]), *more]


@contextlib.contextmanager
def opened(*words: str) -> Iterator[Run]:
    """Context that opens a run of train.py with the overrides `words`, on random latents."""
    with tempfile.TemporaryDirectory() as folder:
        yield open_run(Path(folder), words)


def host(check: Check) -> None:
    """Time steps of networks so narrow that kernel launches and Python take most of the time.
    They are as deep as DiT-S and DiT-XL. The times show how much a step can gain from a CUDA graph."""
    predicted = {("S", "compiled"): 13, ("S", "eager"): 28}  # ms

    def steps_of(size: str, how: str) -> None:
        small = ["model.hidden_size=24", "model.num_heads=2", f"train.compile={how != 'eager'}"]
        with opened(*words_of(size, *small, f"train.cuda_graphs={how == 'graphed'}", images=2)) as run:
            arms = kinds_of(run)
            for name, turn in check.turns(calls_of(arms)).items():
                milliseconds = 1e3 * turn.median / BLOCK
                facts = {"stages": stages(*arms[name]), "ms_a_block": milliseconds / len(run.network.blocks)}
                check.add(f"{size}'s depth, {name}, {how}", milliseconds, "ms", predicted.get((size, how)), **facts)

    for size in ("S",) if CPU else ("S", "XL"):
        for how in ("eager", "compiled") if CPU else ("eager", "compiled", "graphed"):
            check.attempt(f"{size}'s depth, {how}", partial(steps_of, size, how))


def steps(check: Check) -> None:
    """Measure training steps of each DiT size, with and without token routes: speed, memory, time by kind of kernel."""
    predictions = PREDICTED_STEPS["H100" if "H100" in device_name(DEVICE) else "H200"]

    def steps_of(size: str, micro: int | None) -> None:
        dense, routed, ratio = predictions[size]
        with opened(*words_of(size, f"train.micro_batch_size={micro or 'null'}")) as run:
            arms = kinds_of(run)
            result = measure(arms, check.options.pairs)
            for name, reason in result["failed"].items():
                check.fail(f"{size}, {name}", reason)
            for name, row in result["kinds"].items():
                facts = {key: row[key] for key in ("ms", "mfu", "peak_gb", "first_turn_s", "stages")}
                predicted = {"dense": dense, "routed": routed}.get(name)
                planned = planned_bytes(*arms[name], result["compiled"]) / 1e9
                check.add(f"{size}, {name}: peak memory", row["peak_gb"], "GB", planned, planned=planned)
                check.add(f"{size}, {name}", row["images_per_s"], "images/s", predicted, micro_batch=micro, **facts)
                if "ratio" in row:
                    facts = {key: row[key] for key in ("ratio_95", "ideal", "of_ideal")}
                    expected = ratio if name == "routed" else None
                    check.add(f"{size}, dense over {name}", row["ratio"], "times", expected, **facts)
                for kind, seconds in time_by_kind(partial(take_steps, *arms[name], 2)).items():
                    check.add(f"{size}, {name}: {kind}", 1e3 * seconds / 2, "ms a step")

    for size in check.options.sizes or ("XL", "S", "B", "L"):
        for micro in (None, 128, 64):  # takes the largest micro-batch that fits into memory
            if micro and time.perf_counter() - check.began > 60 * check.minutes:  # what the last one measured stays
                break
            for name in [name for name in check.rows if name.split(",")[0] == size]:
                del check.rows[name]
            check.attempt(size, partial(steps_of, size, micro))
            own = [row for name, row in check.rows.items() if name.split(",")[0] == size]
            if not any(row.get("failed") == "out of memory" for row in own):
                break


def planned_bytes(run: Run, cfg: Settings, compiled: bool) -> int:
    """Return the predicted peak bytes of device memory for a run's step with the settings `cfg`, compiled or not."""
    cfg = replace(cfg, train=replace(cfg.train, memory=run.memory.partition(",")[0]))
    rows, routes = run.micro_batches[0], active_routes(cfg, run.step)
    return memory(cfg, run.network, routes, rows.stop - rows.start, run.precision, compiled, run.aligner).peak


def kernel_kind(name: str) -> str:
    return next(kind for kind, pattern in KERNELS if re.search(pattern, name.lower()))


def time_by_kind(work: Callable[[], None]) -> dict[str, float]:
    """Run `work`; return {kind of kernel, such as "copy": seconds}, on a GPU also "idle", the time between kernels."""
    cuda = DEVICE.type == "cuda"
    wait_for(DEVICE)
    began = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiled:
        work()
        wait_for(DEVICE)
        total = time.perf_counter() - began
    spent: dict[str, float] = defaultdict(float)
    for event in profiled.key_averages():
        spent[kernel_kind(event.key)] += (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e6
    return spent | ({"idle": max(0.0, total - sum(spent.values()))} if cuda else {})


def variants(check: Check) -> None:
    """Time token gathering, the EMA update, and training steps with one setting of torch or train.py changed.
    They take turns with default steps. AOTAutograd's cache is off, as it ignores sdpa_kernel. On a CPU: one setting."""
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    plain = ("train.residual=bf16", "train.cuda_graphs=false", "train.memory=budget")
    settings = dict.fromkeys(plain[:1] if CPU else plain, contextlib.nullcontext)
    if not CPU:
        settings |= {
            "attention by flash": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
            "attention by cuDNN": lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
            "max-autotune without graphs": lambda: inductor.patch(max_autotune=True),
        }

    def beside(usual: Kinds, size: str, name: str) -> None:
        torch._dynamo.reset()  # else compiled blocks of other settings would be taken; the usual run replays its graphs
        words = words_of(size, *[name] * ("=" in name), images=images[size])
        with functorch.patch(enable_autograd_cache=False), settings[name](), opened(*words) as run:
            for kind in ("dense", "routed"):
                called, default = f"{size}, {kind}, {name}", f"{size}, {kind}, as it is beside {name}"
                turns = check.turns(calls_of({default: usual[kind], called: kinds_of(run)[kind]}))
                if len(turns) == 2:
                    facts = {"ms": 1e3 * turns[called].median / BLOCK, "held_gb": turns[called].held / 1e9}
                    check.add(called, statistics.median(turns[called].over(turns[default])), "times as it is", **facts)

    def of(size: str) -> None:
        with opened(*words_of(size, images=images[size])) as run:
            usual = kinds_of(run)
            for kind, turn in check.turns(calls_of(usual)).items():
                unit = f"ms for {run.cfg.train.batch_size} images"
                check.add(f"{size}, {kind}, as it is", 1e3 * turn.median / BLOCK, unit, held_gb=turn.held / 1e9)
            if not (CPU or run.graphs):
                raise RuntimeError("without CUDA graphs the usual run would be compiled anew under each setting")
            for name in settings:
                check.attempt(f"{size}, {name}", partial(beside, usual, size, name))

    images = {"S": 256, "B": 256, "L": 64, "XL": 64}
    for size in check.options.sizes or ("XL", "S"):
        check.attempt(f"{size}, gather and average", partial(gather_and_average, check, size))
        check.attempt(f"{size}, as it is", partial(of, size))


def gather_and_average(check: Check, size: str) -> None:
    """Time gathering by rows against by elements, and the EMA of a DiT of `size` against one lerp of a flat vector."""
    batch, tokens, times = (2, 16, 1) if CPU else (256, 256, 20)
    x = torch.randn(batch, tokens, SIZES[size], device=DEVICE, requires_grad=True)
    ids = torch.rand(batch, tokens, device=DEVICE).argsort(1)[:, : tokens // 2].sort(1).values
    with opened(*words_of(size, "train.compile=false")) as run:
        zero = torch.zeros((), device=DEVICE)
        flat, other = torch.zeros(2, count_parameters(run.network), device=DEVICE)
        calls = {  # by elements: one index per number, and atomic additions in the backward pass
            "gather by elements": lambda: x.gather(1, ids[..., None].expand(-1, -1, x.shape[2])).sum().backward(),
            "gather by rows, as it is": lambda: gather_tokens(x, ids).sum().backward(),
            "average as it is": lambda: run.ema.update(run.network, 1e-4, zero),
            "average in one pass": lambda: flat.lerp_(other, 0.5),
        }
        for name, turn in check.turns({name: repeated(call, times) for name, call in calls.items()}).items():
            check.add(f"{size}, {name}", 1e3 * turn.median / times, "ms")


def peers(check: Check) -> None:
    """Time train.py's dense steps against two plain training loops: over the same network, and over diffusers' DiT."""

    def plain_loop(network: Callable[..., Tensor], latents: Tensor, parameters: nn.Module) -> Callable[[], None]:
        """Return a function that takes BLOCK training steps (a constant) of network(x, t, y) as public scripts do:
        autocast, AdamW, an EMA loop, loss.item(). It trains `parameters`, the module that `network` calls."""
        optimizer = torch.optim.AdamW(parameters.parameters(), lr=1e-4, foreach=True)
        average, labels = copy.deepcopy(parameters), torch.randint(1000, (len(latents),), device=DEVICE)

        def step() -> None:
            noise, t = torch.randn_like(latents), torch.rand(len(latents), device=DEVICE)
            with autocast(DEVICE, "fp32" if CPU else "bf16"):
                loss = (network(latents + t.view(-1, 1, 1, 1) * noise, t, labels) - noise).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for averaged, current in zip(average.parameters(), parameters.parameters()):
                    averaged.lerp_(current, 1e-4)
            loss.item()

        return repeated(step, BLOCK)

    def peers_of(size: str, compiled: bool) -> None:
        from diffusers import DiTTransformer2DModel

        with opened(*words_of(size, f"train.compile={compiled}", images=32 if size == "XL" else 256)) as run:
            _, cfg = kinds_of(run)["dense"]
            heads, side, batch = cfg.model.num_heads, cfg.dataset.size, cfg.train.batch_size
            width, depth = cfg.model.hidden_size // heads, cfg.model.depth
            theirs = DiTTransformer2DModel(heads, width, 4, 4, depth, sample_size=side)
            theirs, plain = theirs.to(DEVICE), copy.deepcopy(run.network)
            latents, first = torch.randn(batch, 4, side, side, device=DEVICE), torch.zeros(1, device=DEVICE)

            def of_diffusers(x: Tensor, t: Tensor, y: Tensor) -> Tensor:
                return theirs(x, (1000 * t).long(), y).sample

            with FlopCounterMode(display=False) as counter, torch.no_grad():
                of_diffusers(latents[:1], first, first.long())
            flops = counter.get_total_flops() / run.network.forward_flops(())
            check.add(f"{size}: FLOPs of diffusers' DiT", flops, "of ours", 1.0)
            more = sum(map(torch.numel, theirs.parameters())) / sum(map(torch.numel, run.network.parameters()))
            check.add(f"{size}: parameters of diffusers' DiT", more, "of ours", 1.12)
            if compiled:  # by block, as the whole of diffusers' XL takes minutes; deepcopy's result is not compiled
                compile_blocks([*theirs.transformer_blocks, *plain.compiled()])
            how = f"{size}, {'compiled' if compiled else 'eager'}"
            calls = {
                f"{how}: train.py": partial(take_steps, run, cfg, BLOCK),
                f"{how}: a plain loop over our network": plain_loop(plain, latents, plain),
                f"{how}: a plain loop over diffusers' DiT": plain_loop(of_diffusers, latents, theirs),
            }
            for name, turn in check.turns(calls).items():
                check.add(name, BLOCK * batch / turn.median, f"images/s of {batch}", held_gb=turn.held / 1e9)

    for size in check.options.sizes or ("B", "XL"):
        for compiled in (False,) if CPU else (False, True):
            check.attempt(f"{size}, peers{', compiled' * compiled}", partial(peers_of, size, compiled))


def kinds(check: Check) -> None:
    """Time training steps of networks other than DiT (SPRINT, Mamba, …) at DiT-B's size, relative to DiT-B's steps."""
    small = ["model.hidden_size=96", "model.depth=6", "dataset.size=8", "train.batch_size=2"]
    shape = ["experiment=imagenet256_b2", *(small if CPU else ["train.batch_size=128"])]

    def beside(name: str, predicted: float) -> None:
        model, *more = name.split()
        with opened(*shape, "model=dit") as run, opened(*shape, f"model={model}", *more) as other:
            turns = check.turns(calls_of({"dit": (run, run.cfg), name: (other, other.cfg)}))
        if len(turns) == 2:
            facts = {"ms": 1e3 * turns[name].median / BLOCK, "held_gb": turns[name].held / 1e9}
            times = turns[name].over(turns["dit"])
            check.add(f"{name} over dit", statistics.median(times), "times", predicted, **facts)

    for name, predicted in OTHERS.items():
        check.attempt(name, partial(beside, name, predicted))


def sampling(check: Check) -> None:
    """Time DiT-XL, Stable Diffusion's decoder and DINOv2-B, with random weights, in fp32, TF32 and bf16, in pictures/s.
    Record the largest difference of an output from the fp32 one, relative to the largest fp32 output. Time samples of
    DiT-S and DiT-XL in bf16, with and without CUDA graphs."""
    batch = 2 if CPU else 64

    def network(size: str = "XL") -> Called:
        with opened(*words_of(size, "train.compile=false")) as run:
            side, model = run.cfg.dataset.size, run.network.eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)  # adaLN-Zero's output is 0 at the start
        t = torch.rand(batch, device=DEVICE)
        return model, (torch.randn(batch, 4, side, side, device=DEVICE), t, torch.arange(batch, device=DEVICE))

    def decoder() -> Called:
        from diffusers import AutoencoderKL

        widths = (32, 32) if CPU else (128, 256, 512, 512)  # Stable Diffusion's
        down, up = ("DownEncoderBlock2D",) * len(widths), ("UpDecoderBlock2D",) * len(widths)
        model = AutoencoderKL(3, 3, down, up, widths, layers_per_block=2, latent_channels=4)
        return model.decoder, (torch.randn(batch, 4, *[8 if CPU else 32] * 2, device=DEVICE),)

    def dinov2() -> Called:
        from transformers import Dinov2Config, Dinov2Model

        small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2} if CPU else {}
        model = Dinov2Model(Dinov2Config(patch_size=14, image_size=224, **small))
        return model, (torch.randn(batch, 3, *[28 if CPU else 224] * 2, device=DEVICE),)

    def speeds(name: str, made: Callable[[], Called]) -> None:
        model, inputs = made()
        model, outputs = model.to(DEVICE).eval(), {}

        def run(precision: str) -> None:
            set_tf32(["tf32" if precision == "TF32" else "ieee"] * 3)
            with torch.no_grad(), autocast(DEVICE, "bf16" if precision == "bf16" else "fp32"):
                output = model(*inputs)
            outputs[precision] = getattr(output, "last_hidden_state", output).float()

        calls = {f"{name}, {precision}": partial(run, precision) for precision in ("fp32", "TF32", "bf16")}
        for called, turn in check.turns(calls).items():
            exact, found = outputs["fp32"], outputs[called.rpartition(", ")[2]]
            off = float((found - exact).abs().max() / exact.abs().max())
            check.add(called, batch / turn.median, "pictures/s", largest_difference=off)

    def samples(size: str) -> None:
        graphed = network(size)[0].to(DEVICE)
        usual = copy.deepcopy(graphed)
        usual.register_forward_hook(lambda *given: None)  # then it is sampled without graphs
        sampler, seeds = Sampler(2 if CPU else 20, batch, "bf16"), range(batch)

        def drawn(model: nn.Module) -> Tensor:
            return torch.cat(list(draw(Model(EDM(), model), seeds, torch.arange(batch), sampler)))

        same = torch.equal(drawn(graphed), drawn(usual))
        calls = {"by CUDA graphs": partial(drawn, graphed), "without": partial(drawn, usual)}
        for how, turn in check.turns({f"{size}, 39 calls {how}": call for how, call in calls.items()}).items():
            check.add(how, batch / turn.median, "pictures/s", same_bits=same)

    for name, made in {"a call of XL's network": network, "decoder": decoder, "DINOv2-B": dinov2}.items():
        check.attempt(name, partial(speeds, name, made))
    for size in ("S", "XL"):
        check.attempt(f"{size}, samples", partial(samples, size))


PARTS = {  # function of a part → minutes after which it begins no further measurement, and what its numbers decide
    machine: (1, "attention's backend, and how far from the data sheet predictions may start"),
    host: (1.5, "train.cuda_graphs"),
    steps: (8, "what is worth making faster, and scripts/plan.py's constants"),
    variants: (5, "train.memory, train.residual, attention, compile mode, the pass of the average, the gather"),
    peers: (4, "whether anything here is slower than a plain loop"),
    kinds: (5, "model.kernel, and the chunks of RWKV and Mamba"),
    sampling: (3, "decode_precision, alignment.precision"),
}


def main() -> None:
    options, _ = options_of(Options, others=False)
    path = options.out
    if not path and DEVICE.type == "cuda":
        slug = re.sub(r"[^a-z0-9]+", "_", device_name(DEVICE).lower().replace("nvidia", "")).strip("_")
        path = str(ROOT / "benchmarks" / "results" / f"gpu_{slug}.json")
    path = path and check_file(path)
    result = json.loads(path.read_text()) if path and path.exists() else {}
    for part, (minutes, decided) in PARTS.items():
        if options.part in (None, part.__name__):
            began = time.perf_counter()
            print(f"{part.__name__}: {part.__doc__.splitlines()[0]}", flush=True)
            earlier = result.get(part.__name__, {}) if options.sizes and part in (steps, variants, peers) else {}
            facts = {key: earlier[key] for key in ("commit", "torch", "time", "note") if key in earlier}
            rows = {
                name: facts | row
                for name, row in earlier.get("rows", {}).items()
                if re.split("[,:]", name)[0] not in options.sizes
            }
            result[part.__name__] = {**circumstances(), "rows": rows}
            part(Check(part.__name__, minutes, path, result, options))
            print(f"  {time.perf_counter() - began:.0f} s; decides {decided}\n")


if __name__ == "__main__":
    begin(main)
