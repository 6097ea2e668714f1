"""The optimizer step against PyTorch's own, and what it leaves alone when numbers are bad; of any optimizer, also one
that no file of the project knows."""

import copy
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import equal, launch, logged, random_network, same, size_of, state
from test_survival import spoil
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from tread.checkpoints import checkpoint
from tread.checkpoints.ema import EMA, exponential, fused_average, power
from tread.runtime import schema
from tread.training.optimizer import backward, learning_rate, optimizer_step
from tread.training.optimizers import OPTIMIZERS, Optim, OptimizerEntry
from tread.training.run import StepStatistics


def network(seed=0):
    return random_network(seed, hidden_size=16, depth=2, num_heads=2)


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=1.0, **{"weight_decay": 0.01, "fused": True, **options})


class Watch(TorchDispatchMode):
    """Keeps the names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        self.seen.append(str(operator))
        return operator(*arguments, **(options or {}))


def give_gradients(model, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator).to(parameter.device)


@pytest.mark.parametrize("clip_norm", [None, 0.5, 1e9])
def test_steps_equal_those_of_torch(clip_norm):
    """Reference: clip_grad_norm_ and AdamW in a loop over the parameters."""
    ours, theirs = network(), network()
    optimizer, reference = adamw(ours), adamw(theirs, fused=False, foreach=False)
    for step in range(5):
        give_gradients(ours, step), give_gradients(theirs, step)
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip_norm or math.inf)
        reference.param_groups[0]["lr"] = 0.01 * (step + 1)
        reference.step()
        norm, skip = optimizer_step(optimizer, 0.01 * (step + 1), clip_norm)
        assert_close(norm, expected)
        assert skip.item() == 0.0 and all(parameter.grad is None for parameter in ours.parameters())
    for a, b in zip(ours.parameters(), theirs.parameters()):
        assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_leaves_everything_bit_for_bit(bad):
    model = network()
    optimizer, averages = adamw(model), [EMA(model, exponential(0.9)), EMA(model, power(0.1))]
    give_gradients(model, 0)
    optimizer_step(optimizer, 0.01, None)
    for average in averages:
        average.update(model, average.share(0), torch.tensor(0.0))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"], [a.network for a in averages]))
    give_gradients(model, 1)
    model.blocks[1].mlp.fc1.weight.grad[3, 2] = bad
    norm, skip = optimizer_step(optimizer, 0.01, 1.0)
    assert skip.item() == 1.0 and not norm.isfinite()
    for average in averages:
        average.update(model, average.share(1), skip)
    assert equal(model.state_dict(), before[0])
    for index, kept in optimizer.state_dict()["state"].items():
        assert equal(kept, before[1][index])
    for average, old in zip(averages, before[2]):
        assert equal(average.network.state_dict(), old.state_dict())
    give_gradients(model, 2)
    assert optimizer_step(optimizer, 0.01, None)[1].item() == 0.0  # and it goes on


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_average_in_one_pass_is_the_lerp(device):
    """Torch's lerp, up to a unit in the last place of the larger number; a skipped step leaves the average as it is."""
    model, other = network(0).to(device), network(1).to(device)
    for share in (1e-4, 0.1, 0.6, 1.0):
        averaged, current = [p.detach().clone() for p in model.parameters()], list(other.parameters())
        expected = [a.lerp(w.detach(), share) for a, w in zip(averaged, current)]
        share, kept = torch.tensor(share, device=device), [a.clone() for a in averaged]
        with torch.no_grad():
            fused_average(averaged, current, share, torch.ones((), device=device))
            assert all(map(torch.equal, averaged, kept))
            fused_average(averaged, current, share, torch.zeros((), device=device))
        for found, lerp, old, new in zip(averaged, expected, kept, current):
            ulp = torch.finfo().eps * torch.stack([lerp.abs(), old.abs(), new.detach().abs()]).amax(0)
            assert ((found - lerp).abs() <= ulp).all()


def test_an_average_takes_whichever_network_it_is_given():
    """The mean of two, then of another; and weights that were loaded into a network since."""
    first, second, third = network(0), network(1), network(2)
    average, zero = EMA(first, exponential(0.5, warmup=False)), torch.tensor(0.0)
    average.update(second, average.share(0), zero)
    average.update(third, average.share(1), zero)
    third.load_state_dict(first.state_dict())
    average.update(third, average.share(2), zero)
    models = zip(average.network.parameters(), first.parameters(), second.parameters(), network(2).parameters())
    for found, a, b, c in models:
        assert_close(found, ((a + b) / 2 + c) / 4 + a / 2)


class Odd(torch.optim.Optimizer):
    """State of every kind: numbers of Python and of the group, other dtypes, nested, made late, of no parameter."""

    def __init__(self, parameters, lr, weight_decay=0.0, power=0.5):
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "power": power, "steps": 0, "sum": None})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["steps"] += 1
            total = sum(p.grad.double().sum() for p in group["params"])
            group["sum"] = total if group["sum"] is None else group["sum"] + total
            for parameter in group["params"]:
                kept = self.state[parameter]
                if not kept:
                    kept |= {"count": 0, "warm": False, "none": None, "scale": math.inf, "pair": (1, [2.5, None])}
                    kept |= {"mean": torch.zeros_like(parameter, dtype=torch.float64), "quarters": None}
                    kept["factors"] = [torch.zeros(()), {"rows": torch.zeros(len(parameter)), 7: True}]
                kept["count"] += 1
                kept["warm"] = kept["count"] > 2
                kept["scale"] = min(kept["scale"], 0.1 * kept["count"])
                kept["mean"] = kept["mean"] * 0.9 + parameter.grad
                kept["factors"][0] += parameter.grad.abs().mean()
                kept["factors"][1]["rows"] += parameter.grad.flatten(1).mean(1) if parameter.dim() > 1 else 0.0
                kept["quarters"] = (4 * kept["mean"]).clamp(-100, 100).to(torch.int8)
                parameter -= group["lr"] * (kept["mean"].float() / (1 + kept["factors"][0]) ** group["power"])
        self.state["calls"] = self.state.get("calls", 0) + 1


ANY = {
    "adamw, not fused": lambda p: torch.optim.AdamW(p, lr=1.0, weight_decay=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1.0),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1.0),
    "sgd": lambda p: torch.optim.SGD(p, lr=1.0, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9, nesterov=True),
    "odd": lambda p: Odd(p, lr=1.0),
}


def plain(value):
    """A state with its types, and tensors as what they hold."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [plain(item) for item in value]
    return (value.dtype, value.tolist()) if torch.is_tensor(value) else (type(value), value)


@pytest.mark.parametrize("name", ANY)
def test_any_optimizer_clips_skips_is_saved_and_goes_on_as_by_hand(name, tmp_path):
    """Reference: the same optimizer where gradients are divided by hand, and bad ones left out by `if`."""
    ours, theirs = network(), network()
    optimizer, reference = ANY[name](ours.parameters()), ANY[name](theirs.parameters())
    for step in range(8):
        give_gradients(ours, step), give_gradients(theirs, step)
        bad = step in (0, 3, 6)
        if bad:
            ours.blocks[1].mlp.fc1.weight.grad[3, 2] = math.nan if step % 2 else math.inf
        norm, skip = optimizer_step(optimizer, 0.01 * (step + 1), 2.0)
        assert skip.item() == bad and all(parameter.grad is None for parameter in ours.parameters())
        reference.param_groups[0]["lr"] = 0.01 * (step + 1)
        if not bad:
            for parameter in theirs.parameters():
                parameter.grad /= norm / 2.0
            reference.step()
        assert equal(ours.state_dict(), theirs.state_dict())
        assert plain(optimizer.state_dict()["state"]) == plain(reference.state_dict()["state"])
        if step == 4:
            checkpoint.save(tmp_path, 5, {"optimizer": checkpoint.optimizer_tensors(optimizer, ours)}, {"config": {}})
            ours = copy.deepcopy(ours)
            optimizer = ANY[name](ours.parameters())
            checkpoint.load_optimizer(optimizer, ours, checkpoint.find(tmp_path).tensors("optimizer"))


def test_state_that_can_not_be_saved_is_refused():
    model = network()
    optimizer = ANY["sgd"](model.parameters())
    optimizer.state["calls"] = object()
    with pytest.raises(ValueError, match="the state of SGD can't be saved: Object of type object"):
        checkpoint.optimizer_tensors(optimizer, model)


def test_sgd_is_the_closed_form():
    """v = μ·v + g + λ·θ; θ -= lr·v, or with Nesterov lr·(g + λ·θ + μ·v); g scaled to norm 1; numbers, not tensors."""
    for nesterov in (False, True):
        weight = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
        options = {"momentum": 0.9, "nesterov": nesterov}
        optimizer = settings(name="sgd", weight_decay=0.1, options=options).build([("weight", weight)])
        theta, velocity = [1.0, -2.0], [0.0, 0.0]
        for step, gradient in enumerate([(3.0, 4.0), (0.3, -0.4), (math.nan, 1.0), (-6.0, 8.0)]):
            weight.grad = torch.tensor(gradient, dtype=torch.float64)
            optimizer_step(optimizer, 0.1 / (step + 1), 1.0)
            norm = math.hypot(*gradient)
            for i in range(2) if math.isfinite(norm) else ():
                g = gradient[i] / max(1.0, norm) + 0.1 * theta[i]
                velocity[i] = 0.9 * velocity[i] + g
                theta[i] -= 0.1 / (step + 1) * (g + 0.9 * velocity[i] if nesterov else velocity[i])
            assert weight.tolist() == pytest.approx(theta, rel=1e-12)


@pytest.mark.parametrize("name, waits", [("sgd", 0), ("momentum", 1), ("odd", 3)])
def test_the_device_decides_unless_state_is_not_its_own(name, waits):
    """How often a number is taken out of a tensor in three steps; of momentum in the first, which makes the state."""
    model, watch = network(), Watch()
    optimizer = ANY[name](model.parameters())
    for step in range(3):
        give_gradients(model, step)
        with watch:
            optimizer_step(optimizer, 0.01, 1.0)
    assert len([operator for operator in watch.seen if "_local_scalar_dense" in operator]) == waits


@pytest.mark.gpu
@pytest.mark.parametrize("options", [None, {"capturable": True}, {}])
def test_on_a_gpu(options, tmp_path):
    """PyTorch's watch over waiting, where the state is the device's; bits as of `if`; and state comes back there."""

    def make(parameters):
        return ANY["momentum"](parameters) if options is None else torch.optim.NAdam(parameters, lr=1.0, **options)

    ours, theirs = network().cuda(), network().cuda()
    optimizer, reference = make(ours.parameters()), make(theirs.parameters())
    for step in range(4):
        give_gradients(ours, step), give_gradients(theirs, step)
        if step == 2:
            ours.blocks[1].mlp.fc1.weight.grad[3, 2] = math.nan
        decides = all(v.is_cuda for kept in optimizer.state.values() for v in kept.values())
        torch.cuda.set_sync_debug_mode("error" if step and decides else "default")
        norm, _ = optimizer_step(optimizer, 0.01, 2.0)
        torch.cuda.set_sync_debug_mode("default")
        if step != 2:
            for parameter in theirs.parameters():
                parameter.grad /= norm / 2.0
            optimizer_step(reference, 0.01, None)
    assert equal(ours.state_dict(), theirs.state_dict())
    checkpoint.save(tmp_path, 1, {"optimizer": checkpoint.optimizer_tensors(optimizer, ours)}, {"config": {}})
    again = make(ours.parameters())
    checkpoint.load_optimizer(again, ours, checkpoint.find(tmp_path).tensors("optimizer"))
    for parameter, kept in optimizer.state.items():
        assert all(again.state[parameter][key].device == value.device for key, value in kept.items())


def test_settings_of_groups_are_today_s_and_what_the_optimizer_changes_there_is_resumed(monkeypatch):
    """A constructor that gives its groups other settings than the optimizer's defaults."""

    def make(parameters, lr, weight_decay):
        groups = [{"params": parameters[:1], "weight_decay": weight_decay}, {"params": parameters[1:], "power": 1.0}]
        return Odd(groups, lr)

    monkeypatch.setitem(OPTIMIZERS, "grouped", OptimizerEntry(make, lambda options: 2))
    model = network()
    optimizer = settings(name="grouped", weight_decay=0.1).build(model.named_parameters())
    give_gradients(model, 0)
    optimizer_step(optimizer, 0.01, None)
    other = settings(name="grouped", weight_decay=0.2).build(model.named_parameters())
    checkpoint.load_optimizer(other, model, checkpoint.optimizer_tensors(optimizer, model))
    actual = [(group["weight_decay"], group["power"], group["steps"]) for group in other.param_groups]
    assert actual == [(0.2, 0.5, 1), (0.0, 1.0, 1)]
    assert [group["sum"] for group in other.param_groups] == [group["sum"] for group in optimizer.param_groups]


def settings(**options):
    tree = {"lr": 1.0, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "clip_norm": None}
    tree |= {"schedule": "constant", "warmup_steps": 0, "final_lr": 0.0}
    return schema.read({**tree, **options}, Optim, "optim.")


@pytest.mark.parametrize(
    "options, shown",
    [
        ({"name": "adam"}, "optim.name is 'adam', but must be adamw, muon, sgd or a plugin's"),
        ({"name": "sgd", "options": {"momentun": 0.9}}, "{momentun:0.9}.*optim.name=sgd takes momentum, .*'momentun'"),
        ({"options": {"betas": [0.9, 0.9]}}, "optim.name=adamw takes amsgrad.*multiple values.*optim.options=null"),
        ({"final_lr": 2.0}, "optim.final_lr is 2.0.*between 0 and optim.lr, 1.0"),
        ({"name": "muon"}, "optim.muon_lr is null, .*optim.name=muon needs a rate: 1e-3 say"),
        ({"muon_lr": 0.1}, "optim.muon_lr is 0.1, .*optim.name=adamw has neither"),
        ({"muon_scale": "match_rms"}, "optim.muon_scale match_rms, but optim.name=adamw has neither"),
        ({"name": "muon", "muon_lr": 0.1, "options": {"amsgrad": True}}, "takes momentum, nesterov, steps there"),
    ],
)
def test_bad_options_are_named(options, shown):
    with pytest.raises(ValueError, match=shown):
        settings(**options).build([("weight", torch.nn.Parameter(torch.zeros(2)))])


@pytest.mark.parametrize(
    "name, options", [("adamw", None), ("adamw", {"amsgrad": True}), ("sgd", None), ("sgd", {"momentum": 0.9})]
)
def test_the_size_of_state_that_is_said_is_what_it_takes(name, options):
    model, optim = network(), settings(name=name, options=options)
    optimizer = optim.build(model.named_parameters())
    give_gradients(model, 0)
    optimizer_step(optimizer, 0.01, None)
    numbers = sum(value.numel() for kept in optimizer.state.values() for value in kept.values() if value.dim())
    assert numbers == optim.copies * size_of(model)


@pytest.fixture
def nadam(monkeypatch):
    """An entry as a paper would add it."""
    entry = OptimizerEntry(torch.optim.NAdam, lambda options: 2, ("betas", "eps"))
    monkeypatch.setitem(OPTIMIZERS, "nadam", entry)
    return "optim.name=nadam"


RUN = "results/digits-tread"


def test_another_optimizer_skips_a_nan_and_goes_on_bit_for_bit(tmp_path, nadam, monkeypatch):
    """Reference: the steps spoilt by hand, and the run without an interruption."""
    options = ["every.save=4", "optim.clip_norm=0.5", nadam, "optim.options={momentum_decay: 0.01}"]
    spoil(monkeypatch, {2, 4})
    text = launch(tmp_path, *options)
    run, parts = tmp_path / RUN, tmp_path / "results/parts"
    shutil.copytree(run / "step_0000004", parts / "step_0000004")
    spoil(monkeypatch, {0})
    launch(tmp_path, *options, "name=parts")
    assert logged(run, "bad_steps") == [0, 0, 1, 0, 1, 0]
    assert same(run, parts) and "optimizer: nadam {momentum_decay:0.01}" in text
    whole = state(run)
    assert int(whole["optimizer/step/x_embedder.proj.bias"]) == 4
    size = sum(path.stat().st_size for path in (run / "latest").glob("*.safetensors"))
    numbers = sum(value.numel() for key, value in whole.items() if key.startswith("model/"))
    assert 16 * numbers < size < 16 * numbers + 60_000  # weights, averages, two moments; beside them names and steps


def test_a_run_goes_on_by_another_optimizer_and_says_so(tmp_path):
    """Reference: a run by the new one from the same weights: SGD from none but weights, as it has no state."""
    options = ("every.save=2", "optim.lr=0.01")
    launch(tmp_path, *options, "train.steps=2")
    begun = state(tmp_path / RUN)
    text = launch(tmp_path, *options, "train.steps=3", "optim.name=sgd", "optim.options={momentum: 0.9}")
    assert "warning: optim.name was adamw, is sgd" in text and "its state begins anew, weights and averages go" in text
    assert "weights   raw and averaged, not the optimizer's state, of" in text
    switched = state(tmp_path / RUN)
    kept = {key.removeprefix("optimizer/momentum_buffer/"): v for key, v in switched.items() if "momentum_" in key}
    assert len(kept) == len([key for key in switched if key.startswith("optimizer/")])
    for name, buffer in kept.items():  # the first one is the gradient
        assert_close(switched[f"model/{name}"], begun[f"model/{name}"] - 0.01 * buffer)
    text = launch(tmp_path, "train.steps=4", "optim.name=adamw", "optim.options=null")
    assert "warning: optim.name was sgd, is adamw" in text
    assert int(state(tmp_path / RUN)["optimizer/step/x_embedder.proj.bias"]) == 1


def test_an_infinite_loss_with_finite_gradients_spoils_them():
    weight = torch.tensor([1e20], requires_grad=True)
    loss = (weight**2).sum()
    assert loss.isinf()
    backward(loss)
    assert weight.grad.isnan().all()
    weight.grad = None
    backward((2 * weight).sum())
    assert weight.grad.item() == 2.0


def test_the_tally_leaves_bad_steps_out_of_means_and_counts_them_in_a_row():
    tally = StepStatistics("cpu")
    for loss, norm, skip in ((1.0, 2.0, 0.0), (math.nan, math.nan, 1.0), (3.0, 4.0, 0.0), (math.inf, 1.0, 1.0)):
        tally.add(torch.tensor(loss), torch.tensor(norm), torch.tensor(skip), torch.tensor(loss))
    sums = {"loss": 4.0, "grad_norm": 6.0, "good": 2.0, "bad": 2.0, "alignment": 4.0}
    rows = {"in_a_row": 1.0, "longest": 1.0, "ago": 2.0}
    assert tally.read() == {**sums, **rows, "recent": "0101"} == StepStatistics("cpu", tally.read()).read()
    tally.restart()
    tally.add(torch.tensor(1.0), torch.tensor(math.nan), torch.tensor(1.0))
    rows = {"in_a_row": 2.0, "longest": 2.0, "ago": 0.0}
    assert tally.read() == {**dict.fromkeys(sums, 0.0), "bad": 1.0, **rows, "recent": "01011"}
    for skip in (0.0, 0.0, 1.0):
        tally.add(torch.tensor(1.0), torch.tensor(1.0), torch.tensor(skip))
    assert [tally.read()[name] for name in ("in_a_row", "longest", "ago")] == [1.0, 2.0, 3.0]


def test_learning_rates():
    """Closed forms, by hand."""

    def rates(steps, at, **options):
        cfg = SimpleNamespace(optim=settings(**options), train=SimpleNamespace(steps=steps))
        return [learning_rate(cfg, step) for step in at]

    assert set(rates(100, (0, 50, 99, 200), lr=1e-4)) == {1e-4}
    linear = {"schedule": "linear", "warmup_steps": 10, "final_lr": 0.5}
    assert rates(110, (0, 4, 9), **linear) == pytest.approx([0.1, 0.5, 1.0])
    assert rates(110, (10, 60, 110, 500), **linear) == pytest.approx([1.0, 0.75, 0.5, 0.5])
    cosine = rates(100, (0, 25, 50, 100), lr=2.0, schedule="cosine")
    assert cosine == pytest.approx([2.0, 1 + 2**-0.5, 1.0, 0.0])


def test_groups_have_their_own_rates_and_0_freezes(tmp_path):
    """Against plain SGD by hand: each parameter moves by its group's rate times its gradient."""
    model, groups = network(), ({"match": "bias$", "lr": 0.5}, {"match": "^blocks", "lr": 0})
    optim = settings(name="sgd", groups=groups, lr=0.1)
    optim.freeze(model)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    named = [pair for pair in model.named_parameters() if pair[1].requires_grad]
    optimizer = optim.build(named)
    for _, parameter in named:
        parameter.grad = torch.ones_like(parameter)
    optimizer_step(optimizer, 0.05, None)  # the schedule is at half of optim.lr, so are the groups
    for name, value in model.named_parameters():
        rate = 0.25 if name.endswith("bias") else 0.0 if name.startswith("blocks") else 0.05
        torch.testing.assert_close(value.detach(), before[name] - rate)
    assert optim.keeps_state({"optim.lr"}) and not optim.keeps_state({"optim.groups.1.lr"})
    with pytest.raises(ValueError, match="optim.groups.0.match=nothing is found in no trained parameter's name: "):
        settings(groups=({"match": "nothing", "lr": 0.1},)).freeze(network())
    without_biases = network()
    for name, value in without_biases.named_parameters():
        value.requires_grad_(not name.endswith("bias"))
    with pytest.raises(ValueError, match="optim.groups.1.match=blocks.0 is found .* name that no earlier group has: "):
        settings(groups=({"match": "blocks", "lr": 0.1}, {"match": "blocks.0", "lr": 0.2})).freeze(network())
    with pytest.raises(ValueError, match="optim.groups.0.match=bias is found in no trained parameter's name"):
        settings(groups=({"match": "bias", "lr": 0.1},)).freeze(without_biases)
    with pytest.raises(ValueError, match="freezes all parameters"):
        settings(groups=({"match": "", "lr": 0.0},)).freeze(network())
    with pytest.raises(ValueError, match="optim.name=adamw refuses its settings, .*fused. and .foreach."):
        settings(options={"foreach": True}).build(network().named_parameters())
    projector = torch.nn.Parameter(torch.ones(1))  # with a name like a frozen one's
    assert "lr_factor" not in settings(groups=groups).build([("blocks", projector)]).param_groups[0]
    given = ["optim.groups=[{match: y_embedder, lr: 1e-3}, {match: blocks, lr: 0}]", "optim.warmup_steps=2"]
    launch(tmp_path, *given, "train.steps=3", "name=a")
    resumed = launch(tmp_path, *given, "name=a")
    launch(tmp_path, *given, "name=whole")
    assert same(tmp_path / "results/a", tmp_path / "results/whole")
    first, last = (state(tmp_path / f"results/a/step_000000{step}") for step in (3, 6))
    assert "the others are frozen" in resumed and "begins anew" not in resumed
    names = [name for name in first if name.startswith("model/")]
    frozen = {name for name in names if torch.equal(first[name], last[name])}
    assert frozen == {name for name in names if name.startswith("model/blocks")} | {"model/pos_embed"}
    groups = "optim.groups=[{match: y_embedder, lr: 1e-3}, {match: blocks, lr: 0}, {match: x_embedder, lr: 1e-2}]"
    told = launch(tmp_path, groups, "train.steps=7", "name=a")
    assert "warning: optim.groups.2 was nothing, is {match:x_embedder,lr:0.01}" in told and "begins anew" in told
