"""What a training step asks of the host: operators, each a launch or more on a GPU, and time over a bare loop.

The network is of S's depth and 24 channels wide, so that a device would have nothing to do."""

import copy
import statistics
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import routing_module
from tread.models.architectures import ARCHITECTURES

SMALL = ["experiment=imagenet256_s2", "model=tread", "model.hidden_size=24", "model.num_heads=2"]
SMALL += ["train.batch_size=2", "train.compile=false"]
FREE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view", "lift_fresh"}
FREE |= {"scalar_tensor", "_local_scalar_dense", "_record_function_enter_new", "_record_function_exit"}


class Launches(TorchDispatchMode):
    """Counts operators that compute: neither views nor memory alone."""

    def __init__(self):
        super().__init__()
        self.counted = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, returned = function.overloadpacket.__name__, function._schema.returns
        view = any(value.alias_info is not None and not value.alias_info.is_write for value in returned)
        self.counted[name] += not view and name not in FREE
        return function(*args, **(kwargs or {}))


@pytest.fixture
def opened(import_benchmark, tmp_path):
    """benchmarks/step_time.py, and its run of the small network."""
    threads, step_time = torch.get_num_threads(), import_benchmark("step_time")
    yield step_time, step_time.open_run(tmp_path, SMALL)
    torch.set_num_threads(threads)


def test_operators_of_a_step(opened, monkeypatch):
    """Without the checks that a CPU makes. Today's numbers, torch 2.13; an operator over a list of tensors, such as the
    optimizer's, counts once."""
    step_time, run = opened
    monkeypatch.setattr(routing_module, "readable", lambda values: False)
    kinds = step_time.kinds_of(run)
    for blocks, most in (("whole", {"dense": 867, "routed": 881}), ("empty", {"dense": 148, "routed": 161})):
        for name, kind in kinds.items():
            step_time.take_steps(*kind, 2)
            with Launches() as launches:
                step_time.take_steps(*kind, 1)
            count = launches.counted.total()
            assert most[name] / 2 < count <= most[name] + 5, (blocks, name, count, launches.counted)
        for block in run.network.blocks:
            monkeypatch.setattr(block, "forward", lambda x, c: x)


@pytest.mark.slow
def test_time_over_a_bare_loop(opened):
    """A loop as public scripts have it, over a copy of the network: AdamW, an average by parameter, loss.item()."""
    step_time, run = opened
    run, cfg = step_time.kinds_of(run)["dense"]
    network, average = copy.deepcopy(run.network), copy.deepcopy(run.network)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, foreach=True)
    latents = torch.randn(cfg.train.batch_size, cfg.dataset.channels, cfg.dataset.size, cfg.dataset.size)
    latents = latents.to(run.processes.device)

    def bare(steps):
        for _ in range(steps):
            t, labels = (torch.rand(len(latents), device=latents.device) for _ in range(2))
            noise = torch.randn_like(latents)
            output = network(latents + t.view(-1, 1, 1, 1) * noise, t, (1000 * labels).long())
            loss = F.mse_loss(output, noise)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for averaged, current in zip(average.parameters(), network.parameters()):
                    averaged.lerp_(current, 1e-4)
            loss.item()

    turns = step_time.take_turns({"ours": lambda: step_time.take_steps(run, cfg, 5), "bare": lambda: bare(5)}, 30)
    assert statistics.median(turns["ours"].over(turns["bare"])) <= 1.15


WAITS = {  # what a run trains → its overrides
    "dit": ["model=tread"],
    "lightning": ["model=tread_lightning", "model.norm=rms", "model.mlp=swiglu", "model.positions=rope"],
    "dit_text": ["model=tread_text"],
    "lightning_text": ["model=tread_lightning_text"],
    "words": ["model=tread_text", "text.encoder=words"],
    "mamba": ["model=tread_mamba", "model.head_dim=16", "model.state=16"],
    "hybrid": ["model=tread_mamba", "model.head_dim=16", "model.state=16", "model.attention_every=3"],
    "maskdit": ["model=maskdit"],
    "rwkv": ["model=tread_rwkv"],
    "sprint": ["model=sprint"],
    "norm": ["model=tread", "model.routes.0.select=norm"],
    "aligned with itself": ["model=tread", "alignment=self"],
    "aligned, text": ["model=tread_text", "alignment=self"],
    "repa": ["dataset=digits", "model=tread", "alignment=repa", "alignment.source=live", "alignment.encoder=tiles:own"],
}
TILES = """
def own(pictures):
    return pictures.float().unflatten(3, (4, -1)).unflatten(2, (4, -1)).mean(dim=(3, 5)).flatten(2).transpose(1, 2)
"""


def test_every_network_is_watched():
    assert WAITS.keys() >= ARCHITECTURES.keys()


@pytest.mark.gpu
@pytest.mark.parametrize("name", WAITS)
def test_no_step_waits_on_a_gpu(import_benchmark, tmp_path, monkeypatch, name):
    """PyTorch's own watch over synchronising calls, compiled, in bf16, with CUDA graphs and then without (repa: without
    alone); the first steps compile, make states and record the graphs."""
    (tmp_path / "tiles.py").write_text(TILES)
    monkeypatch.syspath_prepend(tmp_path)
    step_time, heads = import_benchmark("step_time"), [] if name == "rwkv" else ["model.num_heads=2"]
    small = ["model.hidden_size=128", "model.depth=6", "train.batch_size=8", "train.micro_batch_size=4", *heads]
    data = [] if name == "repa" else ["experiment=imagenet256_s2"]
    run = step_time.open_run(tmp_path, [*data, *WAITS[name], *small, "train.precision=bf16"])
    for graphed in (True, False)[name == "repa" :]:
        for kind in step_time.kinds_of(run).values():
            step_time.take_steps(*kind, 4)
            assert (run.graphs is not None) == graphed
            torch.cuda.set_sync_debug_mode("error")
            step_time.take_steps(*kind, 2)
            torch.cuda.set_sync_debug_mode("default")
        if graphed:
            run.graphs.leave("steps are watched without them, too")
