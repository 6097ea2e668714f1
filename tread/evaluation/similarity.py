"""Measures how alike the tokens between a network's blocks are: the cosine similarity of each pair of states.

State 0 is the embedded sequence of tokens, state k + 1 the output of block k. Within a route, a range of blocks that
some tokens skip, a state holds only the tokens that do not skip (with Route.rejoin "stale", all). Two states are
compared on the tokens that both hold, matched by position in the grid. The state after a route's last block holds the
skipped tokens again, as before the route (or before block Route.rejoin), unless mask tokens replace them there.

Shapes: B samples, N tokens, K kept tokens, D channels, L blocks."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from routing_module import Record, Route, check_routes, scatter_tokens
from tread.checkpoints.for_sampling import SavedNetwork
from tread.data.dataset import LatentDataset
from tread.diffusion.guidance import Routes
from tread.diffusion.sampling import Model
from tread.evaluation.heldout_loss import read_points
from tread.evaluation.prompts import check_text
from tread.models.backbone import Backbone
from tread.preparing import digits
from tread.routing.ids import RULES, check_ratio, pair
from tread.runtime.randomness import seeded_uniform


class States(NamedTuple):
    """The tokens in one forward pass of L blocks: state 0 is the first block's input, state k + 1 block k's output.

    tokens  (L + 1, B, N, D) fp32, at their positions in the grid; 0 for tokens that a state does not hold.
    held    (L + 1, B, N) bool: whether a state holds a token; False while the token skips blocks.
    """

    tokens: Tensor
    held: Tensor


def block_states(
    network: Backbone, x: Tensor, t: Tensor, y: Tensor, routes: Routes = (), **more: Tensor
) -> tuple[Tensor, States]:
    """Return a network's output (B, out_channels, S, S) and its States. The inputs are those of Backbone.forward:
    latents x, time input t, labels or texts y, `routes` from `pair` (tread/routing/ids.py); in `more`, class_token."""
    embedded: list[Tensor] = []
    record = Record(blocks=range(len(network.blocks)))
    with network.x_embedder.register_forward_hook(lambda _, given, output: embedded.append(output)):
        result = network(x, t, y, routes=routes, record=record, **more)
    resolved = [(route.resolve(len(network.blocks)), ids) for (route, _), ids in zip(routes, record.ids)]
    ending = {route.end: (route, ids) for route, ids in resolved if network.skipped_return}
    whole = embedded[0].float()
    all_held = torch.ones(whole.shape[:2], dtype=torch.bool, device=whole.device)
    states = [(whole, all_held)]
    for block in record.blocks:
        output, ids = record.outputs[block]
        held = all_held
        if block in ending:
            route, chosen = ending[block]
            tokens = route.rejoins.join(states[route.saved_before][0], output.float(), chosen)
        elif ids is None:
            tokens = output.float()
        else:
            tokens = scatter_tokens(torch.zeros_like(whole), output, ids)
            held = torch.zeros_like(all_held).scatter(1, ids, True)
        states.append((tokens, held))
    return result, States(*map(torch.stack, zip(*states)))


def similarity(batches: Iterable[States]) -> Tensor:
    """Return the mean cosine similarity of each pair of states over the tokens that both hold: (L + 1, L + 1) fp64, on
    the CPU. All tokens of all samples weigh the same; NaN for two states that never hold the same token. One batch is
    in memory at a time. A token whose channels are all 0 has similarity 0 to every token, itself included."""
    total = count = 0.0
    for states in batches:
        units = F.normalize(states.tokens, dim=-1).flatten(1)  # (L + 1, B·N·D)
        held = states.held.flatten(1).double()
        total, count = total + (units @ units.T).double().cpu(), count + (held @ held.T).cpu()
    return total / count


@torch.no_grad()
def noised_states(
    model: Model, data: LatentDataset, samples: int, noise_levels: int, seed: int, batch_size: int
) -> Iterator[States]:
    """Yield batches of States, the tokens between the model's blocks under its routes, for `samples` noised samples of
    `data`, spread evenly over the dataset and over `noise_levels` noise levels. The random numbers for a sample's noise
    and kept tokens depend only on `seed` and the sample's number, not on its batch; so a route with select="shared",
    which keeps the same tokens in a whole batch, runs with select="token", as in sampling."""
    network, device = model.network, next(model.network.parameters()).device
    per_point = [RULES[route.select].for_sampling(route) for route in model.routes]
    for numbers in torch.arange(samples).split(batch_size):
        asked = (data, numbers, samples, noise_levels, device, f"similarity {seed}")
        (x, y, level, noise), more = read_points(model.process, *asked)
        routes = []
        for place, route in enumerate(per_point):
            uniform = seeded_uniform(numbers.tolist(), (network.num_tokens,), f"similarity route {place} {seed}")
            routes.append(pair(route, uniform.to(device), network.grid))
        noisy = model.process.noised(x, level, noise)
        yield block_states(network, *model.process.precondition(noisy, level), y, routes, **more)[1]


def adjacent(matrix: Tensor) -> float:
    """Return the mean similarity of neighbouring states, from the `matrix` that `similarity` returns."""
    return matrix.diagonal(1).mean().item()


def settle_routes(saved: SavedNetwork, asked: Sequence[Route] | None) -> tuple[Route, ...]:
    """Return the routes `asked` (None: the network's), resolved (Route.resolve) and sorted by start block. Raises
    ValueError if the network can't run them, or if a selection_ratio above 0 in `asked` skips none or all but one."""
    model, grid = saved.cfg.model, (saved.latents.shape[1] // saved.cfg.model.patch_size,) * 2
    routes = model.routes if asked is None else tuple(asked)
    try:
        replace(model, routes=routes)
    except ValueError as error:
        raise ValueError(f"routes do not fit this network: {error}") from error
    for number, route in enumerate(asked or ()):
        check_ratio(route, grid, f"routes.{number}.selection_ratio")
    return check_routes(routes, model.depth)


def open_latents(saved: SavedNetwork, folder: str | None = None) -> LatentDataset:
    """Open the latents in `folder`, normalised as in the network's training. None: the held-out data of the network's
    run, else its training data; the digits are written if they are missing. Raises FileNotFoundError, or ValueError if
    the network was trained on latents of another shape, class list, scale, shift or autoencoder."""
    dataset = saved.cfg.dataset
    place = Path(folder or dataset.heldout or dataset.path).expanduser()
    if folder is None and dataset.embedded == "digits":
        digits.prepare_digits(place, "heldout" if dataset.heldout else "train")
    model = saved.cfg.model
    try:
        text = saved.cfg.text.encoder if model.takes_text else None
        data = LatentDataset(place, text=text, class_token=model.class_token)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}; if the latents of the training have moved: data=<folder>") from error
    data.steps_per_epoch(1)
    if model.takes_text:
        check_text(saved, data.text_spec, place)
    tokens = [data.class_fingerprint, saved.found.info.get("class_token")]
    if model.class_token and None not in tokens and tokens[0] != tokens[1]:
        raise ValueError(f"{place} has class tokens of another encoder than the network was trained with")
    trained, known = saved.latents, None not in (data.latents.fingerprint, saved.latents.fingerprint)
    for name in ("shape", "classes", "scale", "shift", "fingerprint" if known else "autoencoder"):
        there, here = getattr(trained, name), getattr(data.latents, name)
        if there != here:
            said = f"{place} holds latents of another {name} than the network was trained on"
            raise ValueError(f"{said}: {str(here)[:100]}, not {str(there)[:100]}; data=<folder> names others")
    data.latents = replace(data.latents, channel_shift=trained.channel_shift, channel_scale=trained.channel_scale)
    return data
