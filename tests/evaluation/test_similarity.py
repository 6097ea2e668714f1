"""Similarity of blocks' outputs: states and matrices against loops over blocks, samples and tokens; the door on digits.

The references are the blocks called one after the other by hand, and the cosine by its formula.
"""

import itertools
import math
import shutil
from dataclasses import replace
from functools import partial

import pytest
import similarity as door
import torch
from conftest import CPU, RGB, launch, launch_door, opened, randomized, read_json, save_checkpoint
from torch.testing import assert_close

from dit import DiT
from routing_module import Route
from tread.checkpoints import checkpoint
from tread.data.dataset import LatentDataset
from tread.data.latents import LatentSpec, to_network
from tread.data.writer import write_dataset
from tread.diffusion.edm import EDM
from tread.diffusion.sampling import Model
from tread.evaluation.similarity import States, adjacent, block_states, noised_states, open_latents, similarity
from tread.models.backbone import Backbone
from tread.models.mamba import Mamba
from tread.models.maskdit import MaskDiT
from tread.models.rwkv import RWKV
from tread.routing.ids import choose_ids
from tread.runtime.randomness import seeded_normal, seeded_uniform


def everywhere(*states) -> States:
    """States that hold all of their tokens, of one sample."""
    tokens = torch.tensor(states, dtype=torch.float32)[:, None]
    return States(tokens, torch.ones(tokens.shape[:3], dtype=torch.bool))


def inputs(batch: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, 4, 8, 8, generator=generator)
    return x, torch.rand(batch, generator=generator), torch.arange(batch) % 10


def by_hand(network, x, t, y, routes):
    """[{(sample, token): vector} of each state]: the blocks in turn, each sample by itself, a token a vector."""
    states = [{} for _ in range(len(network.blocks) + 1)]
    for sample in range(len(x)):
        one = slice(sample, sample + 1)
        condition = network.t_embedder(t[one]) + network.y_embedder(y[one])
        tokens = (network.x_embedder(x[one]) + network.pos_embed)[0]
        states[0] |= {(sample, n): tokens[n] for n in range(len(tokens))}
        seen = list(range(len(tokens)))
        for number, block in enumerate(network.blocks):
            for route, ids in routes:
                if number == route.start:
                    seen = ids[sample].tolist()
            rows = len(seen) // network.grid[1]
            grid = {"grid": (rows, network.grid[1])} if network.needs_grid else {}
            done = block(tokens[seen][None], condition, **grid)[0]
            tokens = tokens.clone()
            tokens[seen] = done
            for route in [route for route, _ in routes if number == route.end and network.skipped_return]:
                away = set(range(len(tokens))) - set(seen)
                before = states[route.rejoin]
                tokens = torch.stack([before[sample, n] if n in away else t for n, t in enumerate(tokens)])
                seen = list(range(len(tokens)))
            states[number + 1] |= {(sample, n): tokens[n] for n in seen}
    return states


def cosines(states) -> list[list[float]]:
    """Their mean over the tokens that both of two states hold."""

    def mean(a, b):
        both = [(a[key], b[key]) for key in a.keys() & b.keys()]
        return sum(float(u @ v / (u.norm() * v.norm())) for u, v in both) / len(both)

    return [[mean(a, b) for b in states] for a in states]


def lively(kind: type[Backbone], **sizes: int) -> Backbone:
    """A network on 4×8×8 latents of 10 classes whose blocks change their tokens much."""
    sizes |= {"input_size": 8, "in_channels": 4, "hidden_size": 16, "depth": 6, "num_classes": 10}
    return randomized(partial(kind, **sizes), 1, 0.3)


def test_equal_tokens_are_1_orthogonal_ones_0_opposite_ones_minus_1():
    a, b = [[3.0, 0.0], [0.0, 2.0]], [[0.0, 1.0], [5.0, 0.0]]
    found = similarity([everywhere(a, [[6.0, 0.0], [0.0, 0.1]], b, [[-1.0, 0.0], [0.0, -1.0]])])
    expected = [[1, 1, 0, -1], [1, 1, 0, -1], [0, 0, 1, 0], [-1, -1, 0, 1]]
    assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)
    assert found.dtype == torch.float64 and adjacent(found) == pytest.approx(1 / 3)


def test_batches_count_by_their_tokens_and_states_without_a_common_token_are_nan():
    alike, unlike = everywhere([[1.0, 0.0]] * 3, [[1.0, 0.0]] * 3), everywhere([[1.0, 0.0]], [[0.0, 1.0]])
    assert similarity([alike, unlike])[0, 1] == pytest.approx(3 / 4)
    apart = States(alike.tokens, torch.tensor([[[True, False, False]], [[False, True, False]]]))
    assert math.isnan(similarity([States(alike.tokens * apart.held[..., None], apart.held)])[0, 1])


ROUTES = {
    "none": [],
    "token": [Route(1, -2)],
    "shared": [Route(1, -2, select="shared")],
    "the whole network": [Route(0, -1, 0.75)],
    "two": [Route(3, 4, 0.25), Route(0, 1)],
    "rows": [Route(1, 3, select="row")],
    "rejoining earlier": [Route(3, 4, rejoin=1)],
    "rejoining where another starts": [Route(4, 5, rejoin=1), Route(1, 2, 0.25)],
}


DECODER = {"decoder_hidden_size": 8, "decoder_depth": 1, "decoder_heads": 2}
HYBRID = {"head_dim": 8, "state": 4, "directions": 4, "attention_every": 2, "num_heads": 2}
NETWORKS = {"dit": (DiT, {"num_heads": 2}), "rwkv": (RWKV, {}), "mamba": (Mamba, HYBRID)}
NETWORKS["maskdit"] = MaskDiT, {"num_heads": 2, **DECODER}


@pytest.mark.parametrize(
    "network, kind",
    [
        *itertools.product(("dit", "rwkv"), ROUTES),
        ("mamba", "rejoining earlier"),
        ("maskdit", "none"),
        ("maskdit", "the whole network"),
    ],
)
@torch.no_grad()
def test_states_and_similarity_equal_those_by_hand(network, kind):
    """No state of MaskDiT behind the first, the last one included, holds dropped tokens."""
    own = {"rwkv": {"select": "row"}, "mamba": {"select": "row"}, "maskdit": {"fp32": "off"}}.get(network, {})
    network = lively(NETWORKS[network][0], **NETWORKS[network][1])
    x, t, y = inputs(3)
    uniform = torch.rand(2, 3, 16, generator=torch.Generator().manual_seed(1))
    routes = [(r, choose_ids(r, u, (4, 4))) for r, u in zip((replace(r, **own) for r in ROUTES[kind]), uniform)]
    result, found = block_states(network, x, t, y, routes)
    expected = by_hand(network, x, t, y, [(route.resolve(6), ids) for route, ids in routes])
    assert torch.equal(result, network(x, t, y, routes)) and not network.blocks[0]._forward_hooks
    for state, tokens, held in zip(expected, found.tokens, found.held):
        assert {tuple(key) for key in held.nonzero().tolist()} == state.keys()
        assert not tokens[~held].any()
        rounding = max(1e-3, 2e-5 * tokens.abs().max().item())  # MaskDiT's states grow to 670
        for key, token in state.items():
            assert_close(tokens[key], token, atol=rounding, rtol=1e-3)
    matrix = similarity([found])
    assert_close(matrix, torch.tensor(cosines(expected)).double(), atol=1e-4, rtol=0)
    assert matrix.min() < 0.8


def dataset(folder, count: int = 5) -> LatentDataset:
    meaning = LatentSpec(shape=(4, 8, 8), classes=tuple("abcdefghij"), autoencoder="none", dtype="float32", scale=2.0)
    write_dataset(folder, meaning, [(torch.randn(count, 1, 4, 8, 8).numpy(), torch.arange(count).numpy())])
    return LatentDataset(folder)


@torch.no_grad()
def test_points_are_those_one_by_one_whatever_the_batch(tmp_path):
    """Sample, level, noise and ids by their addresses; a route that training batches share has each point's own."""
    data, edm, route = dataset(tmp_path / "data"), EDM(), Route(1, 4, select="shared")
    network = lively(DiT, num_heads=2)
    model = Model(edm, network, (route,))
    states = []
    for k in range(7):
        stored = data.read(torch.tensor([k % 5]).numpy()).stored
        sigma = edm.quantiles(4)[(k % 5 + k // 5) % 4].float()
        x = to_network(stored, data.latents) + sigma * seeded_normal([k], (4, 8, 8), "similarity 3")
        ids = seeded_uniform([k], (16,), "similarity route 0 3").argsort()[:, :8].sort().values
        x, time = x / (sigma**2 + 0.25).sqrt(), (sigma.log() / 4).view(1)
        states.append(block_states(network, x, time, torch.tensor([k % 5]), [(route, ids)])[1])
    expected = similarity(states)
    for size in (1, 3, 16):
        assert_close(similarity(noised_states(model, data, 7, 4, 3, size)), expected, atol=1e-5, rtol=0)
    assert not torch.allclose(similarity(noised_states(model, data, 7, 4, 2, 16)), expected, atol=1e-4)


# ------------------------------------------------------------------------------------------- the door


def compare(folder, *overrides: str) -> str:
    """Do in this process what `python scripts/similarity.py` does in a folder; returns what it prints."""
    return launch_door(door.main, "similarity", folder, "cpu_threads=1", "samples=24", *overrides)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with runs on the digits: results/digits-tread, and results/digits-dit-rf without a route."""
    folder = tmp_path_factory.mktemp("runs")
    short = ["train.steps=2", "every.save=2", "every.evaluate=2", "every.sample=2", "eval.points=8"]
    launch(folder, "model=tread", *short)
    launch(folder, "model=dit", "objective=rf", *short)
    return folder


def written(folder) -> dict:
    return read_json(folder / "similarity.json")


def test_the_door_writes_both_panels_beside_the_checkpoint(trained, monkeypatch):
    drawn = []
    save = door.save_heat_maps
    monkeypatch.setattr(door, "save_heat_maps", lambda *given: drawn.append(given) or save(*given))
    said = compare(trained, "checkpoint=results/digits-tread")
    folder = (trained / "results/digits-tread/latest").resolve()
    record = written(folder)
    assert (folder / "similarity.png").read_bytes().startswith(b"\x89PNG")
    assert not list(folder.glob(".*"))
    assert (record["step"], record["samples"], record["weights"]) == (2, 24, "ema")
    assert record["sha256"] == checkpoint.find(folder).sha256("ema")
    assert record["route"] == "r(2→2) keeps 8 of 16 tokens" and record["route"] in said
    for name in ("dense", "routed"):
        matrix = torch.tensor(record[name])
        assert matrix.shape == (7, 7)
        assert_close(matrix, matrix.T, rtol=0, atol=2e-6)  # six places, each entry rounded by itself
        assert matrix.diagonal().tolist() == pytest.approx([1.0] * 7, abs=1e-5)
        mean = sum(matrix[i, i + 1].item() for i in range(6)) / 6
        assert record["adjacent"][name] == pytest.approx(mean, abs=1e-5)
    assert record["dense"] != record["routed"]
    with torch.no_grad():
        one = opened(folder)
        held_out = LatentDataset(trained / "data/digits/heldout")
        expected = similarity(noised_states(one.load(CPU), held_out, 24, 16, 0, 24))
    assert_close(torch.tensor(record["routed"]).double(), expected, atol=1e-5, rtol=0)
    ((_, panels, others, columns, rows, _),) = drawn
    assert list(panels) == ["all tokens", record["route"]] and not others
    assert columns == rows == ["in", 0, 1, 2, 3, 4, 5]


def test_without_a_route_only_the_dense_panel_or_the_route_asked_for(trained, tmp_path, monkeypatch):
    """And it works for rectified flow, and on latents that lie elsewhere."""
    monkeypatch.setattr(door, "save_heat_maps", lambda *given: None)
    shutil.copytree(trained / "data/digits/train", tmp_path / "moved")
    place = [f"out={tmp_path}/out", f"data={tmp_path}/moved", "checkpoint=results/digits-dit-rf", "weights=model"]
    said = compare(trained, *place)
    record = written(tmp_path / "out")
    assert record["routed"] is None and record["route"] is None and record["routes"] == []
    assert record["data"] == f"{tmp_path}/moved" and "noise levels, t 0." in said and "the network has no route" in said
    compare(trained, *place, "routes=[{start: 1, end: -2, selection_ratio: 0.75},{start: 5, end: 5}]")
    record = written(tmp_path / "out")
    assert record["route"] == "r(1→4) keeps 4 of 16 tokens, r(5→5) keeps 8 of 16 tokens"
    assert len(record["routed"]) == 7
    compare(trained, *place, "checkpoint=results/digits-tread", "routes=[]")
    assert written(tmp_path / "out")["routed"] is None


REFUSED = [
    (["checkpoint=nowhere"], "no checkpoint at nowhere"),
    (["routes=[{start: 2, end: 9}]"], "routes do not fit this network: route end 9 is out of range for 6 blocks"),
    (["routes=[{start: 1, end: 3},{start: 2, end: 4}]"], "overlap"),
    (["routes=[{start: 1}]"], "missing settings: routes.0.end"),
    (["routes=[{start: 1, end: 2, selection_ratio: 1}]"], "routes.0.selection_ratio is 1.0, but must lie in [0, 1)"),
    (["routes=[{start: 1, end: 2, selection_ratio: 0.95}]"], "routes.0.selection_ratio 0.95 keeps a single token"),
    (["data=nowhere"], "no dataset at nowhere: it has no index.json; .* have moved: data=<folder>"),
    (["samples=0"], "samples is 0, but must be positive"),
    (["out=file/out"], "file/out could not be written"),
]


@pytest.mark.parametrize("words, shown", REFUSED)
def test_what_can_not_be_is_refused_in_one_line(trained, words, shown):
    (trained / "file").touch()
    with pytest.raises(SystemExit) as ended:
        compare(trained, "checkpoint=results/digits-dit-rf", *words)
    message = str(ended.value)
    assert message.startswith("error: ") and "\n" not in message
    for part in shown.split(" .* "):
        assert part in message
    assert not list((trained / "results/digits-dit-rf/latest").glob("similarity.*"))


def test_latents_of_another_meaning_and_broken_weights_are_refused(tmp_path, composed):
    """The meanings that a dataset has are each another one than the checkpoint's in turn."""
    _, folder = save_checkpoint(tmp_path / "run", composed, path=str(tmp_path / "data"), heldout=None)
    one = opened(folder)
    pixels = torch.zeros(1, 1, 3, 16, 16).numpy()
    write_dataset(tmp_path / "data", RGB, [(pixels, torch.zeros(1, dtype=torch.int64).numpy())])
    assert open_latents(one).latents == RGB
    for name, value in {"scale": 2.0, "shift": 1.0, "classes": tuple("abcdf"), "autoencoder": "other"}.items():
        meaning = LatentSpec(**{**RGB.__dict__, name: value, "scale_applied": True})
        write_dataset(tmp_path / name, meaning, [(pixels, torch.zeros(1, dtype=torch.int64).numpy())])
        with pytest.raises(ValueError, match=f"{name} holds latents of another {name} than the network"):
            open_latents(one, str(tmp_path / name))
    broken = {name: tensor * math.nan for name, tensor in checkpoint.find(folder).tensors("ema").items()}
    info = {key: one.found.info[key] for key in ("config", "latents", "samples", "versions")}
    checkpoint.save(tmp_path / "broken", 3, {"ema": broken}, info)
    with pytest.raises(SystemExit, match="the tokens of all tokens are not finite"):
        compare(tmp_path, "checkpoint=broken")
