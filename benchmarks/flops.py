"""Prints parameters and costs of networks in the TREAD paper's sizes: python benchmarks/flops.py

Costs are for one image: a forward pass in training, and a step of sampling with each kind of guidance. They are
computed in GMAC, 10⁹ multiply-adds (2·10⁹ FLOPs); nothing is run.
"""

if __name__ == "__main__":
    import checkout  # noqa: F401


from dataclasses import replace

import torch
from timing import begin, composed

from rf import RF
from tread.checkpoints.network import build_network, process_of
from tread.diffusion.guidance import NO_GUIDANCE, Guidance, Schedule
from tread.diffusion.sampling import Model, Sampler
from tread.models.backbone import count_parameters
from tread.training import settings

SIZES = ("s2", "b2", "l2", "xl2")
MODELS = ("dit", "tread", "maskdit", "sprint", "rwkv", "tread_rwkv")
UP, DOWN = Schedule("cosine", 0.0, 0.6), Schedule("cosine", 0.6, 0.0)
GUIDANCES = {
    "tread": {
        "none": NO_GUIDANCE,
        "cfg": Guidance("cfg", 1.5),
        "cfg for t in 0.1..0.7": Guidance("cfg", 1.5, interval=(0.1, 0.7)),
        "sparse 0.3, 0.7": Guidance("sparse", 1.5, 0.3, 0.7),
        "SG_FLOPS: sparse 0.5, 0.9": Guidance("sparse", 1.5, 0.5, 0.9),
        "SG_FID: sparse 0→0.6, 0.6→0": Guidance("sparse", 1.5, UP, DOWN),
    },
    "sprint": {kind: Guidance(kind, 1.5) for kind in ("cfg", "path_drop", "path_drop_class")},
}


def build(*overrides: str) -> Model:
    """Return the diffusion process, network (on meta device) and token routes of train.py with Hydra `overrides`."""
    cfg = settings.read(composed("config", overrides))
    with torch.device("meta"):
        return Model(process_of(cfg), build_network(cfg), cfg.model.routes)


def cost(*overrides: str) -> tuple[int, int, int, int]:
    """Return (tokens, parameters, multiply-adds in training, multiply-adds in sampling) of the network that train.py's
    `overrides` give. Multiply-adds are for a forward pass of one image; only in training do tokens skip blocks."""
    model = build(*overrides)
    training, sampling = (model.network.forward_flops(routes) // 2 for routes in (model.routes, ()))
    return model.network.num_tokens, count_parameters(model.network), training, sampling


def main() -> None:
    print("Training: forward, without the tokens it leaves out; a step costs 3 times that. Sampling: all tokens.\n")
    head = "size | tokens | model | parameters | training GMAC | of DiT's | DiT's over it | sampling GMAC | of DiT's"
    print(f"| {head} |\n" + "|---" * 9 + "|")
    shapes = {size: [f"experiment=imagenet256_{size}"] for size in SIZES}
    shapes["960 × 12"] = ["experiment=imagenet256_b2", "model.hidden_size=960"]  # no DiT size, but the paper's 210M
    for size, shape in shapes.items():
        for side in (32, 64):
            costs = {model: cost(*shape, f"model={model}", f"dataset.size={side}") for model in MODELS}
            dense = costs["dit"][2]
            for model, (tokens, parameters, training, sampling) in costs.items():
                cells = f"{training / 1e9:.2f} | {training / dense:.3f} | {dense / training:.3f}"
                cells += f" | {sampling / 1e9:.2f} | {sampling / dense:.3f}"
                print(f"| {size} | {tokens} | {model} | {parameters:,} | {cells} |")
    print("\nA step of sampling XL/2 at 256 tokens, the mean of 50 steps by Euler (rectified flow).\n")
    print("| model | guidance | GMAC, linear | over none | GMAC, with attention | over none |\n" + "|---" * 6 + "|")
    for name, guidances in GUIDANCES.items():
        model = build("experiment=sit256_xl2", f"model={name}")
        for kind, guidance in guidances.items():
            sampler, cells = Sampler(RF.default_steps, guidance=guidance, solver="euler"), []
            plain = replace(sampler, guidance=NO_GUIDANCE)
            for attention in (False, True):
                spent = sampler.flops(model, attention=attention)
                ratio = spent / plain.flops(model, attention=attention)
                cells.append(f"{spent / RF.default_steps / 2e9:.2f} | {ratio:.3f}")
            print(f"| {name} | {kind} | {' | '.join(cells)} |")


if __name__ == "__main__":
    begin(main)
