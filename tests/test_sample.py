"""Sampling: order, seeds and labels, against drawing each sample alone and a known network."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image

import checkpoint
from autoencoder import to_uint8
from compute import use_precision
from dit import DiT
from edm import EDM
from guidance import Guidance
from pictures import save_curve, save_grid
from randomness import generator
from routing_module import Route
from sample import Sampler, draw, draw_pictures, parse_seeds, seeded_labels, spread_classes


def latents_of(network, seeds, labels, **options):
    return torch.cat(list(draw(EDM(), network, seeds, labels, Sampler(**{"steps": 4, **options}))))


SPARSE = Guidance("sparse", 1.5, strong=0.25, weak=0.5)


@pytest.mark.parametrize("guidance", [Guidance(), Guidance("cfg", 1.5), SPARSE], ids=lambda one: one.kind)
def test_a_sample_is_the_same_bits_in_any_company(tiny, guidance):
    """Order, position, neighbours, the start and the padding of the last batch; batches have one shape."""
    options = {"batch_size": 4, "guidance": guidance, "routes": (Route(1, 3),)}
    seeds, labels = [7, 3, 11, 5, 2, 13], torch.tensor([1, 1, 4, 0, 9, 3])
    together = latents_of(tiny, seeds, labels, **options)
    assert together.shape == (6, 4, 8, 8) and together.dtype == torch.float32
    order = [5, 0, 3, 1, 4, 2]
    assert torch.equal(latents_of(tiny, [seeds[i] for i in order], labels[order], **options), together[order])
    assert torch.equal(latents_of(tiny, seeds[3:], labels[3:], **options), together[3:])
    assert torch.equal(latents_of(tiny, seeds[1:2], labels[1:2], **options), together[1:2])


def test_pictures_are_decoded_in_batches_of_one_shape(tiny):
    """20 at once are 16 and 4 for a decoder; a convolution's bits may follow from that, so it never sees the 4."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        convolution = torch.nn.Conv2d(4, 3, 3, padding=1).requires_grad_(False)
    shapes = []

    def decoder(x):
        shapes.append(tuple(x.shape))
        return to_uint8(convolution(x))

    seeds, labels = list(range(27)), torch.arange(27) % 10
    sampler = Sampler(steps=2, batch_size=20)
    forward = torch.cat(list(draw_pictures(EDM(), tiny, decoder, seeds, labels, sampler)))
    backward = torch.cat(list(draw_pictures(EDM(), tiny, decoder, seeds[::-1], labels.flip(0), sampler)))
    assert set(shapes) == {(16, 4, 8, 8)} and forward.shape == (27, 3, 8, 8)
    assert torch.equal(backward.flip(0), forward)


@pytest.mark.parametrize("guidance", [Guidance(), Guidance("cfg", 1.5), SPARSE], ids=lambda one: one.kind)
def test_pictures_hardly_depend_on_the_shape_of_the_batch(tiny, guidance):
    """Within one grey level on at least 99.9% of the pixels, decoded as latents in −1..1."""
    options = {"guidance": guidance, "routes": (Route(1, 3),), "steps": 10}
    seeds, labels = range(32), torch.arange(32) % 10

    def pictures(batch_size):
        sampler = Sampler(batch_size=batch_size, **options)
        return torch.cat(list(draw_pictures(EDM(), tiny, to_uint8, seeds, labels, sampler))).int()

    reference = pictures(32)
    assert reference.float().std() > 20
    for batch_size in (1, 7, 16):
        assert ((pictures(batch_size) - reference).abs() <= 1).float().mean() >= 0.999


def test_a_label_counts_for_its_sample_alone(tiny):
    seeds, labels = [7, 3, 11], torch.tensor([1, 1, 4])
    together, other = latents_of(tiny, seeds, labels), latents_of(tiny, seeds, torch.tensor([2, 1, 4]))
    assert not torch.isclose(other[0], together[0]).all() and torch.equal(other[1:], together[1:])


def test_route_ids_follow_from_the_seed_and_change_from_pass_to_pass(tiny):
    """Ids are those of addressed draws, one for each pass and branch."""
    seen = []

    def spy(module, args, kwargs):
        seen.extend(kwargs["routes"])

    tiny.register_forward_pre_hook(spy, with_kwargs=True)
    latents_of(tiny, [5, 8], torch.tensor([0, 1]), batch_size=2, steps=2, guidance=SPARSE, routes=(Route(1, 3),))
    assert [route.selection_ratio for route, _ in seen] == [0.25, 0.5] * 3  # 2N − 1 calls of two branches
    for row, seed in enumerate((5, 8)):
        for branch, offset, kept in (("strong", 0, 12), ("weak", 1, 8)):
            uniform = torch.rand(3, 16, generator=generator(seed, f"route 0 {branch}"))
            for call in range(3):
                expected = uniform[call].argsort()[:kept].sort().values
                assert torch.equal(seen[2 * call + offset][1][row], expected)


def test_guidance_without_effect(tiny):
    seeds, labels, options = [0, 1], torch.tensor([3, 4]), {"batch_size": 2, "routes": (Route(1, 3),)}
    plain = latents_of(tiny, seeds, labels, **options)
    unit = latents_of(tiny, seeds, labels, guidance=Guidance("cfg", 1.0), **options)
    torch.testing.assert_close(unit, plain, rtol=1e-3, atol=1e-3)
    for guidance in (Guidance("cfg", 2.0), SPARSE):
        assert not torch.isclose(latents_of(tiny, seeds, labels, guidance=guidance, **options), plain).all()
    assert Sampler(40).nfe == 79 and Sampler(40, guidance=SPARSE).nfe == 158


def test_an_untrained_network_gives_the_known_contraction():
    """F = 0 means D = c_skip·x, the denoiser of N(0, σ_data²): samples are noise of that size."""
    network = DiT(input_size=4, patch_size=2, in_channels=1, hidden_size=16, depth=1, num_heads=2, num_classes=3)
    x = latents_of(network, range(500), torch.zeros(500, dtype=torch.int64), steps=40, batch_size=250)
    assert x.std() == pytest.approx(0.5, rel=0.03)


def test_labels_follow_from_the_seed():
    labels = seeded_labels(range(2000), 10, "random")
    assert torch.equal(seeded_labels([7, 1999, 3], 10, "random"), labels[[7, 1999, 3]])
    assert 150 < labels.bincount(minlength=10).min() and labels.bincount().max() < 250  # 200 ± 13.4
    balanced = seeded_labels(range(5, 35), 10, "balanced")
    assert balanced[:3].tolist() == [5, 6, 7] and balanced.bincount().tolist() == [3] * 10
    with pytest.raises(ValueError, match="random, balanced"):
        seeded_labels([0], 10, "sorted")


def test_bad_requests_are_refused(tiny):
    with pytest.raises(ValueError, match="2 seeds for 1 labels"):
        latents_of(tiny, [0, 1], torch.tensor([0]))
    with pytest.raises(ValueError, match="11.*0..9"):
        latents_of(tiny, [0], torch.tensor([11]))
    tiny.final_layer.linear.bias.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        next(draw_pictures(EDM(), tiny, to_uint8, [4], torch.tensor([0]), Sampler(steps=2), check=True))
    with pytest.raises(ValueError, match="fp16"):
        use_precision("fp16", torch.device("cpu"))
    assert use_precision("auto", torch.device("cpu")) == "fp32"


def test_all_cores_are_used_where_a_launcher_left_one():
    """accelerate and torchrun set OMP_NUM_THREADS=1."""
    code = "import torch, compute as c; print(torch.get_num_threads(), c.use_cores(None, 1), c.use_cores(3, 1))"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["1", str(len(os.sched_getaffinity(0))), "3"]


def test_seeds_and_classes():
    assert parse_seeds("0-3") == [0, 1, 2, 3] and parse_seeds("5-5") == [5]
    assert parse_seeds((4, 2)) == [4, 2] and parse_seeds(9) == [9]
    for bad in ("3-1", "a", "1,2"):
        with pytest.raises(ValueError, match=bad):
            parse_seeds(bad)
    assert spread_classes(10, 10) == list(range(10)) and spread_classes(1000, 3) == [0, 500, 999]
    assert spread_classes(2, 10) == [0, 1]


def test_grid_places_pictures_row_by_row(tmp_path):
    pictures = np.arange(6, dtype=np.uint8).reshape(6, 1, 1, 1).repeat(8, 2).repeat(8, 3) * 40
    save_grid(tmp_path / "a" / "grid.png", pictures, columns=3)
    grid = np.asarray(Image.open(tmp_path / "a" / "grid.png"))
    assert grid.shape == (2 * 64 + 2, 3 * 64 + 4)
    assert [grid[10 + 66 * r, 10 + 66 * c] for r in range(2) for c in range(3)] == [0, 40, 80, 120, 160, 200]
    save_grid(tmp_path / "rgb.png", np.zeros((2, 3, 256, 256), dtype=np.uint8), columns=2)
    assert np.asarray(Image.open(tmp_path / "rgb.png")).shape == (256, 514, 3)


def test_curve_is_drawn(tmp_path):
    records = [{"step": s, "loss": 1 / s} for s in range(1, 9)] + [{"step": 8, "eval_loss": 0.1}]
    save_curve(tmp_path / "loss.png", records, routed=True)
    drawn = np.asarray(Image.open(tmp_path / "loss.png").convert("RGB")).reshape(-1, 3)
    assert len(np.unique(drawn, axis=0)) > 10


def test_the_door_refuses_a_bare_state_dict_and_a_misspelt_key(tmp_path, tiny):
    """Public DiT weights predict noise on timesteps: sampling them by EDM would give noise."""
    torch.save(tiny.state_dict(), tmp_path / "dit.pt")
    with pytest.raises(ValueError, match="timesteps"):
        checkpoint.find(tmp_path / "dit.pt")
    for arguments, shown in (
        ([f"checkpoint={tmp_path / 'dit.pt'}"], "timesteps 0..999"),
        ([f"checkpoint={tmp_path / 'none'}"], "no checkpoint at"),
        (["chekpoint=x"], "nearest known one is 'checkpoint'"),
        (["seeds=0-7"], "checkpoint"),
    ):
        command = [sys.executable, str(ROOT / "sample.py"), *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 1 and "error: " in done.stderr and shown in done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_on_a_gpu_pictures_hold_as_on_a_cpu(tiny, precision):
    """Noise, labels and ids are drawn on the CPU, so they are the same bits on any device. Pictures at one batch shape
    are equal in any order; in fp32 they are within one grey level on 99.9% of the pixels in other shapes, and beside
    the CPU's."""
    use_precision(precision, torch.device("cuda"))
    seeds, labels = range(32), torch.arange(32) % 10

    def pictures(device, batch_size, backwards=False):
        sampler = Sampler(10, batch_size, precision, SPARSE, (Route(1, 3),))
        given = list(seeds)[::-1] if backwards else list(seeds)
        return torch.cat(list(draw_pictures(EDM(), tiny.to(device), to_uint8, given, labels[given], sampler))).int()

    reference = pictures("cuda", 16)
    assert torch.equal(pictures("cuda", 16, backwards=True).flip(0), reference)
    for other in [pictures("cuda", 8), pictures("cpu", 16)] if precision == "fp32" else []:
        assert ((other - reference).abs() <= 1).float().mean() >= 0.999
