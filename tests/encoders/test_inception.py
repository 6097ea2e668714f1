"""The Inception against published numbers, TensorFlow's documented resize, and itself in other batches."""

import hashlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import random_inception
from numpy.testing import assert_allclose
from safetensors.torch import load_file, save_file

from tread.encoders import inception
from tread.encoders.inception import Inception, extract, find_weights, load_inception, resize
from tread.evaluation.metrics import Moments, frechet_distance, kernel_distance

WEIGHTS = "weights/inception-2015-12-05.nofc.safetensors"


def test_resize_is_tensorflow_1s():
    """Output pixel i takes input at i·(size/299), between its two neighbours; the last one repeats beyond the edge."""
    x = torch.rand(1, 2, 5, 7, dtype=torch.float64)
    result = resize(x.float())
    for i, j in ((0, 0), (298, 298), (17, 230), (150, 1), (60, 298)):
        y, z = i * 5 / 299, j * 7 / 299
        rows, columns = ((int(v), min(int(v) + 1, n - 1), v - int(v)) for v, n in ((y, 5), (z, 7)))
        expected = sum(
            x[0, :, r, c] * a * b
            for r, a in ((rows[0], 1 - rows[2]), (rows[1], rows[2]))
            for c, b in ((columns[0], 1 - columns[2]), (columns[1], columns[2]))
        )
        torch.testing.assert_close(result[0, :, i, j].double(), expected, rtol=1e-5, atol=1e-5)
    same = torch.rand(1, 3, 299, 299)
    assert torch.equal(resize(same), same)


def test_the_weights_load_strictly_and_nothing_else_does(asset, inception_file, tmp_path):
    network = load_inception(asset(WEIGHTS))
    assert network.fc is None and not network.training
    state = load_file(inception_file)
    for spoilt in (
        {key: value for key, value in state.items() if not key.startswith("Mixed_7c")},
        state | {"AuxLogits.conv0.conv.weight": torch.zeros(8, 48, 1, 1)},
        state | {"fc.weight": torch.zeros(1000, 128), "fc.bias": torch.zeros(1000)},
    ):
        save_file(spoilt, tmp_path / "other.safetensors")
        with pytest.raises(ValueError, match="other weights than"):
            load_inception(tmp_path / "other.safetensors")


def test_features_have_adms_shapes_and_order(tmp_path):
    network = load_inception(random_inception(tmp_path / "whole.safetensors"))
    pictures = torch.randint(0, 256, (2, 3, 40, 40), dtype=torch.uint8)
    result = extract(network, pictures)
    shapes = {name: part.shape for name, part in result.items()}
    assert shapes == {"pool": (2, 2048), "spatial": (2, 2023), "probabilities": (2, 1008)}
    taken = []
    network.Mixed_6d.branch1x1.register_forward_hook(lambda module, given, out: taken.append(out))
    network.Mixed_7c.register_forward_hook(lambda module, given, out: taken.append(out))
    extract(network, pictures)
    spatial, last = taken
    assert spatial.shape == (2, 192, 17, 17) and float(spatial.min()) == 0  # after ReLU
    for row, column, channel in ((0, 0, 0), (0, 1, 0), (3, 11, 5), (16, 16, 6)):
        assert result["spatial"][1, (row * 17 + column) * 7 + channel] == spatial[1, channel, row, column]
    assert_allclose(result["pool"], last.mean(dim=(2, 3)), rtol=1e-5)
    logits = torch.from_numpy(result["pool"]) @ network.fc.weight.T
    assert_allclose(result["probabilities"], logits.softmax(dim=1), rtol=1e-4)  # without the bias
    assert_allclose(result["probabilities"].sum(axis=1), 1, rtol=1e-5)


def test_pools_leave_the_padding_out_and_the_last_takes_the_maximum():
    x = torch.arange(9.0).reshape(1, 1, 3, 3)
    assert inception.average(x)[0, 0, 0, 0] == pytest.approx((0 + 1 + 3 + 4) / 4)
    network, given = Inception(with_classes=False, narrow=16).eval(), []
    x = torch.rand(1, 128, 8, 8)
    for block, part in ((network.Mixed_7b, x[:, :80]), (network.Mixed_7c, x)):
        block.branch_pool.register_forward_hook(lambda module, inputs, out: given.append(inputs[0]))
        block(part)
    averaged, largest = given
    assert torch.equal(averaged, inception.average(x[:, :80])) and torch.equal(largest, F.max_pool2d(x, 3, 1, 1))


def test_batches_and_colours(inception_file):
    network = load_inception(inception_file)
    pictures = torch.randint(0, 256, (5, 3, 33, 33), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    together, alone = extract(network, pictures), [extract(network, picture[None]) for picture in pictures]
    for i, single in enumerate(alone):
        for name, features in together.items():
            assert_allclose(features[i], single[name][0], rtol=1e-4, atol=1e-5)
    for bad in (pictures.float(), pictures[:, :1], pictures[0]):
        with pytest.raises(ValueError, match="uint8"):
            extract(network, bad)


def test_the_file_is_found_checked_and_fetched_once(tmp_path, monkeypatch):
    content = b"weights"
    source = tmp_path / "elsewhere/pt_inception-test.pth"
    source.parent.mkdir()
    source.write_bytes(content)
    monkeypatch.delenv(inception.VARIABLE, raising=False)
    monkeypatch.setattr(inception, "URL", source.as_uri())
    monkeypatch.setattr(inception, "SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    kept = find_weights()
    assert kept.read_bytes() == content and kept.parent == tmp_path / "hub/checkpoints"
    source.unlink()
    assert find_weights() == kept  # once

    kept.write_bytes(b"weighty")
    with pytest.raises(ValueError, match="damaged.*remove it"):
        find_weights()
    kept.unlink()
    with pytest.raises(FileNotFoundError, match=inception.VARIABLE):
        find_weights()
    source.write_bytes(b"another file")
    with pytest.raises(FileNotFoundError, match="could not be fetched"):
        find_weights()
    assert not kept.exists()
    monkeypatch.setenv(inception.VARIABLE, str(source))
    assert find_weights() == source
    with pytest.raises(FileNotFoundError, match="nowhere is not there"):
        find_weights("nowhere")


@pytest.mark.slow
def test_published_example_values_to_their_last_digit(asset):
    """torchmetrics' documentation scores uniform noise 0..199 against 100..254, 100 pictures each, seed 123: KID over
    100 subsets of 50 is 0.0337 ± 0.0023, FID of the first pool's 64 features 12.7202."""
    network, first = load_inception(asset(WEIGHTS)), []
    network.Conv2d_3b_1x1.register_forward_hook(lambda module, given, out: first.append(given[0].mean(dim=(2, 3))))
    with torch.random.fork_rng():
        torch.manual_seed(123)
        Inception(with_classes=True)  # there the network is made after the seed is set, and takes its random numbers
        sets = [torch.randint(*span, (100, 3, 299, 299), dtype=torch.uint8) for span in ((0, 200), (100, 255))]
        parts = [[extract(network, part)["pool"] for part in pictures.split(10)] for pictures in sets]
        pool = [torch.from_numpy(np.concatenate(each)) for each in parts]
        subsets = [kernel_distance(*(single[torch.randperm(100)[:50]] for single in pool)) for _ in range(100)]
    assert (round(np.mean(subsets), 4), round(np.std(subsets), 4)) == (0.0337, 0.0023)
    a, b = (Moments.of(part.numpy()) for part in torch.cat(first).split(100))
    assert frechet_distance(*a.gaussian, *b.gaussian) == pytest.approx(12.7202, abs=1e-4)
