"""Encoders against their equations written out, on the real loading code: a tiny random DINOv2 saved to disk."""

import math
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import CPU, read_json, write_json
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from tread.encoders.autoencoder import fingerprint
from tread.encoders.inception import extract, load_inception
from tread.encoders.pretrained import load_pretrained
from tread.encoders.vision import encoder_name, open_encoder
from tread.preparing.archives import Tar
from tread.preparing.images import read_rgb


def draw(count: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=torch.manual_seed(seed))


def by_hand(state: dict[str, torch.Tensor], pictures: torch.Tensor, side: int) -> torch.Tensor:
    """DINOv2's equations on its parameters: patches, class token, positions, two blocks, last norm."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    x = F.interpolate((pictures.float() / 255 - mean) / std, (14 * side, 14 * side), mode="bicubic")
    patches = F.conv2d(
        x,
        state["embeddings.patch_embeddings.projection.weight"],
        state["embeddings.patch_embeddings.projection.bias"],
        stride=14,
    )
    tokens = torch.cat([state["embeddings.cls_token"].expand(len(x), 1, 32), patches.flatten(2).mT], dim=1)
    class_place, places = state["embeddings.position_embeddings"].split([1, 16], dim=1)
    places = F.interpolate(places.mT.unflatten(2, (4, 4)), (side, side), mode="bicubic").flatten(2).mT
    tokens = tokens + torch.cat([class_place, places], dim=1)

    def norm(values: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(values, (32,), state[f"{name}.weight"], state[f"{name}.bias"], eps=1e-6)

    for layer in ("encoder.layer.0", "encoder.layer.1"):

        def linear(values: torch.Tensor, name: str, layer: str = layer) -> torch.Tensor:
            return F.linear(values, state[f"{layer}.{name}.weight"], state[f"{layer}.{name}.bias"])

        inner = norm(tokens, f"{layer}.norm1")
        parts = [linear(inner, f"attention.attention.{kind}") for kind in ("query", "key", "value")]
        q, k, v = (part.unflatten(2, (2, 16)).transpose(1, 2) for part in parts)
        mixed = ((q @ k.mT / 4).softmax(dim=-1) @ v).transpose(1, 2).flatten(2)
        tokens = tokens + state[f"{layer}.layer_scale1.lambda1"] * linear(mixed, "attention.output.dense")
        inner = linear(F.gelu(linear(norm(tokens, f"{layer}.norm2"), "mlp.fc1")), "mlp.fc2")
        tokens = tokens + state[f"{layer}.layer_scale2.lambda1"] * inner
    return norm(tokens, "layernorm")  # the class token first


@pytest.mark.parametrize("size, side", [(64, 4), (32, 2), (96, 6), (8, 1), (256, 16)])
def test_dinov2_is_its_equations_at_all_sizes(dinov2, size, side):
    """64 px are the positions' own grid; at others they are resampled. 8 px are a single patch."""
    encoder, pictures = open_encoder(str(dinov2), CPU), draw(2, size)
    expected = by_hand(load_file(dinov2 / "model.safetensors"), pictures, side)
    assert_close(encoder.encode(pictures), expected[:, 1:], rtol=1e-4, atol=1e-4)
    assert_close(encoder.encode_both(pictures), (expected[:, 1:], expected[:, 0]), rtol=1e-4, atol=1e-4)
    assert (*encoder.cost(size)[:2], encoder.name) == (side**2, 32, str(dinov2))


def test_flops_are_those_of_the_products(dinov2):
    """Patches, four projections and two of the MLP a block, and attention's two products, as written out."""
    tokens, width = 17, 32
    block = tokens * width * (4 * width + 2 * 2 * width) + 2 * tokens**2 * width
    expected = 2 * (16 * 3 * 14**2 * width + 2 * block)
    assert open_encoder(str(dinov2), CPU).cost(64).flops == expected


def features_agree(encoder, pictures):
    """bf16's features beside fp32's, which are the same bits within training's autocast."""
    exact, coarse = (replace(encoder, precision=kind).encode(pictures) for kind in ("fp32", "bf16"))
    with torch.autocast(encoder.device.type, dtype=torch.bfloat16):
        assert torch.equal(encoder.encode(pictures), exact)
    assert coarse.dtype == exact.dtype == torch.float32 and not torch.equal(coarse, exact)
    assert F.cosine_similarity(coarse, exact, dim=-1).min() > 0.99
    assert (coarse - exact).norm() / exact.norm() < 0.05
    assert replace(encoder, precision="bf16").cost(64) == encoder.cost(64)


def test_bf16_is_close_and_an_encoding_makes_no_constants(dinov2, inception_file, monkeypatch):
    """Constants made of numbers of the host would be copied to the device at each step."""
    pictures = draw(2, 64)
    encoders = [open_encoder(str(dinov2), CPU), open_encoder("inception", CPU, inception=str(inception_file))]
    for encoder in encoders:
        features_agree(encoder, pictures)
    monkeypatch.setattr(torch, "tensor", lambda *_, **__: pytest.fail("a constant is made of numbers of the host"))
    for encoder in encoders:
        encoder.encode(pictures)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_on_a_gpu_an_encoding_does_not_wait(dinov2, inception_file, precision):
    """By PyTorch's watch over waiting; features beside the CPU's."""
    for name in (str(dinov2), "inception"):
        ours, theirs = (open_encoder(name, device, inception=str(inception_file)) for device in ("cuda", CPU))
        features_agree(ours, draw(2, 64))
        ours, pictures = replace(ours, precision=precision), draw(2, 64).cuda()
        torch.cuda.set_sync_debug_mode("error")
        features = ours.encode(pictures)
        torch.cuda.set_sync_debug_mode("default")
        assert F.cosine_similarity(features.cpu(), theirs.encode(pictures.cpu()), dim=-1).min() > 0.99


def test_fewer_tokens_are_averages_and_more_are_refused(dinov2):
    pictures = draw(2, 64)
    whole, half = (open_encoder(str(dinov2), CPU, grid=grid).encode(pictures) for grid in (4, 2))
    for row in range(2):
        for column in range(2):
            ids = [4 * (2 * row + i) + 2 * column + j for i in (0, 1) for j in (0, 1)]
            assert_close(half[:, 2 * row + column], whole[:, ids].mean(dim=1))
    encoder = open_encoder(str(dinov2), CPU, grid=8)
    with pytest.raises(ValueError, match="grid is 8, but .*dinov2 has 4×4 tokens of pictures of 64×64"):
        encoder.encode(pictures)
    assert encoder.cost(128).tokens == 64


def test_weights_that_are_others_are_refused(dinov2, tmp_path, monkeypatch):
    state, config = load_file(dinov2 / "model.safetensors"), read_json(dinov2 / "config.json")

    def refused(shown: str, name: object = tmp_path) -> None:
        with pytest.raises(ValueError, match=shown):
            open_encoder(str(name), CPU)

    lacking = {key: value for key, value in state.items() if key != "layernorm.weight"}
    save_file(lacking, tmp_path / "model.safetensors", {"format": "pt"})
    write_json(tmp_path / "config.json", config)
    refused("lacks weights of a Dinov2Model, or has others: layernorm.weight")
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    write_json(tmp_path / "config.json", {**config, "model_type": "dinov2_with_registers"})
    refused("it is a dinov2_with_registers, and not a dinov2")
    write_json(tmp_path / "config.json", config)
    (tmp_path / "model.safetensors").write_bytes(b"none")
    refused("could not be loaded: ")
    refused("there is no such file or folder\nEncoders are inception, dinov2-s", tmp_path / "nowhere")
    monkeypatch.setitem(sys.modules, "transformers", None)  # as Python marks what can't be imported
    refused("encoder 'dinov2-b' needs transformers: pip install -r requirements-alignment.txt", "dinov2-b")


def test_a_fingerprint_is_of_the_weights_alone(dinov2, tmp_path):
    state = load_file(dinov2 / "model.safetensors")
    (tmp_path / "config.json").write_bytes((dinov2 / "config.json").read_bytes())
    result = open_encoder(str(dinov2), CPU).fingerprint
    for change, equal in ((0, True), (1, False)):
        state["layernorm.bias"][0] += change
        save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
        assert (open_encoder(str(tmp_path), CPU).fingerprint == result) == equal


def test_names_are_recorded_once(tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    monkeypatch.chdir(tmp_path)
    assert encoder_name("facebook/dinov2-base") == encoder_name("dinov2-b") == "dinov2-b"
    assert encoder_name("own") == str(tmp_path / "own")
    assert [encoder_name(name) for name in ("inception", "a:b", "some/hub")] == ["inception", "a:b", "some/hub"]


def test_a_hub_id_is_taken_from_the_cache_and_without_it_the_hub_is_asked_soon(dinov2, monkeypatch, tmp_path):
    """The cache as huggingface_hub lays it out, with weights in half precision; a hub that can't be reached."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    repository, state = tmp_path / "models--facebook--dinov2-small", load_file(dinov2 / "model.safetensors")
    place = repository / "snapshots" / ("a" * 40)
    place.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("a" * 40)
    (place / "config.json").write_bytes((dinov2 / "config.json").read_bytes())
    half = {key: value.half() for key, value in state.items()}
    save_file(half, place / "model.safetensors", {"format": "pt"})
    encoder, pictures = open_encoder("dinov2-s", CPU), draw(2, 64)
    expected = by_hand({key: value.float() for key, value in half.items()}, pictures, 4)[:, 1:]
    assert_close(encoder.encode(pictures), expected, rtol=1e-4, atol=1e-4)
    assert encoder.name == open_encoder("facebook/dinov2-small", CPU).name == "dinov2-s"
    with pytest.raises(ValueError, match="(?s)encoder 'dinov2-b' could not be loaded.*can't be reached"):
        open_encoder("dinov2-b", CPU)
    (place / "model.safetensors").rename(place / "model-00001-of-00001.safetensors")  # weights in parts
    files = dict.fromkeys(half, "model-00001-of-00001.safetensors")
    write_json(place / "model.safetensors.index.json", {"metadata": {}, "weight_map": files})
    assert open_encoder("dinov2-s", CPU).fingerprint == encoder.fingerprint
    asked = {"kinds": {"dinov2": "Dinov2Model"}, "requirements": "", "known": "", "parts": [["CLIPImageProcessor"]]}
    with pytest.raises(ValueError, match="(?s)x could not be loaded.*can't be reached"):  # another part is not cached
        load_pretrained("x", "facebook/dinov2-small", **asked)


# -------------------------------------------------------------------------------------- Inception


def looked_up(maps: np.ndarray, token: tuple[int, int], grid: int, size: int) -> np.ndarray:
    """The map at a token's centre: pixel p of 299 lies at p·size/299 of the picture, and cell i at 21 + 16·i of 299."""
    at = [min(max((((t + 0.5) * size / grid - 0.5) * 299 / size - 21) / 16, 0), 16) for t in token]
    result = np.zeros(maps.shape[0])
    for cell in np.ndindex(17, 17):
        result += math.prod(max(0, 1 - abs(a - c)) for a, c in zip(at, cell)) * maps[(slice(None), *cell)]
    return result


def test_inceptions_map_is_resampled_to_the_tokens(inception_file):
    encoder, pictures = open_encoder("inception", CPU, inception=str(inception_file)), draw(2, 40)
    network, taken = load_inception(inception_file), []
    network.Mixed_6e.register_forward_hook(lambda module, given, out: taken.append(out))
    pooled = extract(network, pictures)["pool"]
    np.testing.assert_allclose(encoder.encode_both(pictures)[1], pooled, rtol=1e-4, atol=1e-5)
    maps, result = taken[0].numpy(), encoder.encode(pictures)
    assert result.shape == (2, 256, 768 // 16) and encoder.fingerprint == fingerprint(network)
    more = open_encoder("inception", CPU, grid=20, inception=str(inception_file)).encode(pictures)
    for row, column in ((0, 0), (15, 15), (3, 12), (8, 1), (0, 9)):
        for grid, tokens in ((16, result), (20, more)):
            expected = looked_up(maps[1], (row, column), grid, 40)
            np.testing.assert_allclose(tokens[1, grid * row + column].numpy(), expected, rtol=1e-4, atol=1e-5)
    fewer = open_encoder("inception", CPU, grid=8, inception=str(inception_file)).encode(pictures)
    assert_close(fewer, F.avg_pool2d(result.mT.unflatten(2, (16, 16)), 2).flatten(2).mT)


def test_a_cell_of_inceptions_map_looks_at_its_place(inception_file, monkeypatch):
    """The pixels that reach a cell of Mixed_6a lie around 21 + 16·i; the maps behind it keep their places."""
    average = partial(F.avg_pool2d, kernel_size=3, stride=2)  # which hands its gradient to all it looks at
    monkeypatch.setattr("tread.encoders.inception.halved", average)
    network = load_inception(inception_file)
    for parameter in network.parameters():
        torch.nn.init.constant_(parameter, 0.01)  # so that no pixel is cut off, and none cancels another
    taken = []
    network.Mixed_6a.register_forward_hook(lambda module, given, out: taken.append(out))
    x = torch.zeros(1, 3, 299, 299, requires_grad=True)
    network.feature_map(x)
    for cell in ((8, 8), (8, 7)):
        (reached,) = torch.autograd.grad(taken[0][0, 0][cell], x, retain_graph=True)
        for pixels, number in zip(reached[0].sum(dim=0).nonzero().T, cell):
            assert (pixels.min() + pixels.max()) / 2 == 21 + 16 * number


@pytest.mark.slow
def test_the_real_inceptions_features_are_of_their_places(asset):
    """Features of a photo's mirror image are most alike at mirrored places; all fit into float16."""
    weights, tar = asset("weights/inception-2015-12-05.nofc.safetensors"), Tar(asset("data/imagenet1000_adm256.tar"))
    encoder = open_encoder("inception", CPU, inception=str(weights))
    names = sorted(name for name in tar.names if name.endswith(".jpg"))[::500]
    photos = torch.stack([torch.from_numpy(np.array(read_rgb(tar.read(name)))) for name in names]).permute(0, 3, 1, 2)
    result, mirrored = encoder.encode(photos), encoder.encode(photos.flip(-1))
    assert result.shape == (2, 256, 768) == (2, *encoder.cost(256)[:2])
    assert result.half().isfinite().all() and (result.half().float() - result).abs().max() < 2e-3 * result.abs().max()
    placed = mirrored.unflatten(1, (16, 16)).flip(2).flatten(1, 2)
    alike, apart = (F.cosine_similarity(result, other, dim=-1).mean() for other in (placed, mirrored))
    assert alike > 0.8 and alike > apart + 0.1, (alike, apart)


# -------------------------------------------------------------------------------- the user's own


def test_a_function_of_the_users_own(tmp_path, monkeypatch):
    (tmp_path / "my_encoders.py").write_text(
        "import torch\n"
        "def mean(pictures):\n    return pictures.float().mean(dim=1).unfold(1, 4, 4).unfold(2, 4, 4).flatten(1, 2)"
        ".flatten(2)\n"
        "def flat(pictures):\n    return pictures.float().flatten(1)\n"
        "def broken(pictures):\n    return pictures.float().flatten(2).mT / 0\n"
        "def three(pictures):\n    return pictures.float().flatten(2)[:, :, :7]\n"
        "class Network(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.map = torch.nn.Conv2d(3, 5, 4, 4)\n"
        "    def forward(self, pictures):\n        return self.map(pictures / 255).flatten(2).mT\n"
        "network = Network()\nnumber = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    pictures = draw(2, 8)
    encoder = open_encoder("my_encoders:mean", CPU)
    assert (encoder.name, *encoder.cost(8)[:2]) == ("my_encoders:mean", 4, 16)
    result = encoder.encode(pictures)
    assert result.shape == (2, 4, 16) and torch.equal(encoder.encode_both(pictures)[1], result.mean(dim=1))
    expected = pictures[1, :, 4:, :4].float().mean(dim=0).flatten()  # the patch on the lower left
    assert_close(result[1, 2], expected)
    network = open_encoder("my_encoders:network", CPU)
    assert network.encode(pictures).shape == (2, 4, 5) and not network.encode(pictures).requires_grad
    assert network.fingerprint != encoder.fingerprint and network.cost(8).flops == 2 * 4 * 5 * 3 * 4**2
    for name, shown in (
        ("my_encoders:flat", r"my_encoders:flat makes \(2, 192\) of pictures \(2, 3, 8, 8\), but must"),
        ("my_encoders:three", r"makes \(2, 3, 7\).*square number"),
        ("my_encoders:nothing", "could not be imported as module:function: .*nothing"),
        ("no_such_module:mean", "could not be imported as module:function: No module named"),
    ):
        with pytest.raises(ValueError, match=shown):
            open_encoder(name, CPU).encode(pictures)
    with pytest.raises(ValueError, match="my_encoders:broken makes features that are not finite of a black picture"):
        open_encoder("my_encoders:broken", CPU).cost(8)
    with pytest.raises(ValueError, match="float32.*must be uint8"):
        encoder.encode(pictures.float())
    with (tmp_path / "my_encoders.py").open("a") as file:
        file.write("# changed\n")
    assert open_encoder("my_encoders:mean", CPU).fingerprint != encoder.fingerprint
