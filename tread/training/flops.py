"""FLOPs of training steps, which depend on the routes of each step; those of alignment are included."""

import itertools
from collections.abc import Sequence

from routing_module import Route
from tread.models.backbone import Backbone
from tread.training.alignment import Aligner
from tread.training.settings import Settings
from tread.training.step import active_routes


def training_flops(cfg: Settings, network: Backbone, steps: range, aligner: Aligner | None = None) -> int:
    """Return the FLOPs of the given training steps on whole batches, with the routes that each step has."""
    alike = itertools.groupby(active_routes(cfg, step) for step in steps)
    each = sum(sample_flops(network, routes, aligner) * sum(1 for _ in group) for routes, group in alike)
    return each * cfg.train.batch_size


def sample_flops(network: Backbone, routes: Sequence[Route], aligner: Aligner | None = None) -> int:
    """Return the FLOPs of training on one sample: forward, backward (twice the forward pass), and alignment."""
    return 3 * network.forward_flops(routes) + (aligner.flops(routes) if aligner else 0)
