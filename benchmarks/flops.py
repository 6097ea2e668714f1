"""Parameters and cost of the paper's sizes, in training and under guidance: python benchmarks/flops.py

GMAC: billions of multiply-adds (half the FLOPs) of the networks for one image, by arithmetic alone.
With attention: matrix products of linear layers and of attention; linear: without the latter.
"""

from __future__ import annotations

import torch
from timing import begin, composed

from rf import RF
from routing_module import check_routes
from tread.checkpoints.network import build_network, process_of
from tread.diffusion.guidance import Guidance, Schedule
from tread.diffusion.sampling import Model, Sampler
from tread.training import settings

SIZES = {"S/2": "s2", "B/2": "b2", "L/2": "l2", "XL/2": "xl2"}
UP, DOWN = Schedule("cosine", 0.0, 0.6), Schedule("cosine", 0.6, 0.0)
KINDS = {
    "none": Guidance(),
    "cfg": Guidance("cfg", 1.5),
    "cfg for t in 0.1..0.7": Guidance("cfg", 1.5, interval=(0.1, 0.7)),
    "sparse 0.3, 0.7": Guidance("sparse", 1.5, 0.3, 0.7),
    "SG_FLOPS: sparse 0.5, 0.9": Guidance("sparse", 1.5, 0.5, 0.9),
    "SG_FID: sparse 0→0.6, 0.6→0": Guidance("sparse", 1.5, UP, DOWN),
}


def read(*overrides: str) -> settings.Settings:
    return settings.read(composed("config", overrides))


def build(cfg: settings.Settings) -> Model:
    with torch.device("meta"):
        return Model(process_of(cfg), build_network(cfg), cfg.model.routes)


def main() -> None:
    print("A forward pass, dense and with the paper's route r(2→depth−4) around half of the tokens; the ratio is dense")
    print("over routed, of training steps too (3 times a forward pass).\n")
    print("| size | tokens | route | parameters, DiT | with TREAD | dense GMAC | routed GMAC | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for size, name in SIZES.items():
        for side in (32, 64):
            shared = (f"experiment=imagenet256_{name}", f"dataset.size={side}")
            cfgs = [read(*shared, f"model={model}") for model in ("dit", "tread")]
            networks = [build(cfg).network for cfg in cfgs]
            counts = [sum(parameter.numel() for parameter in network.parameters()) for network in networks]
            costs = [network.forward_flops(cfg.model.routes) / 2e9 for cfg, network in zip(cfgs, networks)]
            (route,) = check_routes(cfgs[1].model.routes, cfgs[1].model.depth)
            print(
                f"| {size} | {networks[0].num_tokens} | {route.start}→{route.end} | {counts[0]:,} | {counts[1]:,} "
                f"| {costs[0]:.2f} | {costs[1]:.2f} | {costs[0] / costs[1]:.3f} |"
            )
    print(
        "\nDiffusion-RWKV in the same sizes, with half of the rows routed around; 12 blocks of width 960 are no size of"
    )
    print("DiT's, but have about the 210M parameters that the paper's table lists.\n")
    print("| size | tokens | parameters | over DiT's | dense GMAC | routed GMAC | ratio | of it token mixing, dense |")
    print("|---|---|---|---|---|---|---|---|")
    wide = ("experiment=imagenet256_b2", "model.hidden_size=960")
    shapes = {size: (f"experiment=imagenet256_{name}",) for size, name in SIZES.items()} | {"960 × 12": wide}
    for size, shape in shapes.items():
        for side in (32, 64):
            cfg = read(*shape, "model=tread_rwkv", f"dataset.size={side}")
            network, dit = build(cfg).network, build(read(*shape, "model=dit", f"dataset.size={side}")).network
            ours, theirs = (sum(p.numel() for p in built.parameters()) for built in (network, dit))
            dense, linear = (network.forward_flops((), attention) / 2e9 for attention in (True, False))
            routed = network.forward_flops(cfg.model.routes) / 2e9
            print(
                f"| {size} | {network.num_tokens} | {ours:,} | {ours / theirs:.3f} | {dense:.2f} | {routed:.2f} "
                f"| {dense / routed:.3f} | {100 * (dense - linear) / dense:.2f}% |"
            )
    print("\nA step of sampling XL/2 at 256 tokens, r(2→24), the mean of 50 steps by Euler (rectified flow).\n")
    print("| guidance | GMAC, linear | of none | GMAC, with attention | of none |\n|---|---|---|---|---|")
    model, plain = build(read("experiment=sit256_xl2", "model=tread")), {}
    for name, guidance in KINDS.items():
        sampler, cells = Sampler(RF.default_steps, guidance=guidance, solver="euler"), []
        for attention in (False, True):
            cost = sampler.flops(model, attention=attention) / sampler.steps / 2e9
            cells.append(f"{cost:.2f} | {cost / plain.setdefault(attention, cost):.3f}")
        print(f"| {name} | " + " | ".join(cells) + " |")
    print("\nThe same of SPRINT-XL/2, whose weak branch leaves out its sparse part.\n")
    print("| guidance | GMAC, with attention | of none |\n|---|---|---|")
    model, plain = build(read("experiment=sit256_xl2", "model=sprint")), 0.0
    for kind in ("none", "cfg", "path_drop", "path_drop_class"):
        guidance = Guidance(kind, 1.0 if kind == "none" else 1.5)
        cost = Sampler(RF.default_steps, guidance=guidance, solver="euler").flops(model) / RF.default_steps / 2e9
        plain = plain or cost
        print(f"| {kind} | {cost:.2f} | {cost / plain:.3f} |")


if __name__ == "__main__":
    begin(main)
