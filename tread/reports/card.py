"""A model card, README.md on the Hugging Face hub, from a checkpoint's record."""

import json
from collections.abc import Mapping
from pathlib import PurePath

import torch

from tread.checkpoints.exporting import shortened
from tread.checkpoints.for_sampling import SavedNetwork
from tread.checkpoints.network import build_network
from tread.data.latents import LatentSpec
from tread.evaluation.score_files import sampler_told, table
from tread.models.backbone import count_parameters

LISTED = 20  # largest number of class names in a card

FOR_DIFFUSERS = """```python
from diffusers import DiffusionPipeline

pipe = DiffusionPipeline.from_pretrained("{place}", trust_remote_code=True)
pictures = pipe({asked}, seeds=[0, 1]).images
```

A seed draws the same picture as the training code's `sample.py`; a `generator` draws others. diffusers' own pipelines
do not know this network's preconditioning and would draw noise: use the one in this folder."""
FOR_TREAD = """```python
import tread

pictures = tread.load("hf:{place}"{weights}).sample({asked}, seeds=[0, 1])
```"""


def card(
    saved: SavedNetwork,
    info: Mapping,
    dtype: str,
    for_diffusers: bool,
    license: str | None = None,
    place: str | None = None,
) -> str:
    """Return the model card of `saved`: how to sample it, network, data, training and scores, as far as recorded.

    info           the record to publish, a parsed info.json.
    dtype          dtype of the stored weights, as a name.
    for_diffusers  True: the published folder is for diffusers; False: it is a checkpoint of this project.
    license        licence of the weights; None: the card says that it is not stated.
    place          the repository's name on the hub; None: the card says user/name.
    """
    config, cfg = info["config"], saved.cfg
    library = "diffusers" if for_diffusers else "tread"
    kind = "text-to-image" if saved.text else "unconditional-image-generation"
    head = [f"library_name: {library}", f"pipeline_tag: {kind}", "tags: [diffusion, dit, tread]"]
    head += [f"license: {license}"] if license else []
    drawn = '["a red apple", "a green one"]' if saved.text else f"[0, {min(1, cfg.dataset.num_classes - 1)}]"
    prompts, labels = ("prompt", "class_labels") if for_diffusers else ("prompts", "labels")
    asked = f"{prompts if saved.text else labels}={drawn}"
    raw = ', weights="model"' * (saved.weights == "model")
    with torch.device("meta"):
        parameters = count_parameters(build_network(cfg))
    model, latents, train = cfg.model, LatentSpec.from_json(info["latents"]), config["train"]
    until, schedule = train.get("routes_until") if "samples" in info else None, train.get("ratio_schedule")
    share = f"{schedule['start']:.0%} to {schedule['end']:.0%} of the tokens" if schedule else None
    routes = [f"{route}, {share or f'{route.selection_ratio:.0%} of the tokens'}" for route in model.resolved_routes]
    routes += [f"none from step {until:,} on"] if routes and until and until < info["step"] else []
    routes = "; ".join(routes * (until != 0))
    images, width = info["step"] * train["batch_size"], info.get("posthoc", {}).get("sigma_rel", "")
    process = "EDM (arXiv 2206.00364)" if cfg.objective == "edm" else "rectified flow (arXiv 2209.03003)"
    steps = f"{saved.process.default_steps} steps of {saved.process.default_solver} unless told otherwise"
    rows = {
        "network": f"{model.architecture}, {model.blocks}, width {model.hidden_size}, {parameters:,} parameters",
        "route in training": routes or "none: all tokens in all blocks",
        "draws": f"latents {latents.shape} of {latents.autoencoder}, by {process}, {steps}",
        "weights": f"{saved.weights}{width and f' of σ_rel {width:g},'} of step {info['step']:,}, in {dtype}",
    }
    if "samples" in info:
        rows["training"] = f"{images:,} images in batches of {train['batch_size']}, rate {config['optim']['lr']:g}, "
        rows["training"] += f"seed {config['seed']}, code at {info['versions']['git'][:12]}"
        rows["training"] += f", from the weights in {shortened(begun)}" if (begun := config.get("init_from")) else ""
        rows["data"] = f"{config['dataset']['name']}, {info['samples']:,} pictures"
    else:  # of import_checkpoint.py
        rows["training"] = f"elsewhere; imported from {PurePath(info['weights']).name}"
    named = ", ".join(latents.classes[:LISTED]).encode(errors="backslashreplace").decode()  # a folder's may be no UTF-8
    more = f", … ({len(latents.classes):,} in all)" if len(latents.classes) > LISTED else ""
    parts = [
        "---\n" + "\n".join(head) + "\n---",
        f"# {config['name']}",
        (FOR_DIFFUSERS if for_diffusers else FOR_TREAD).format(asked=asked, place=place or "user/name", weights=raw),
        "| | |\n|---|---|\n" + "\n".join(f"| {name} | {said} |" for name, said in rows.items()),
        "" if saved.text else f"Classes, from 0: {named}{more}.",
        "## Scores\n\n" + _scores(saved),
        "## Licence\n\n" + "\n\n".join(filter(None, [license or "Not stated.", info.get("attribution")])),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _scores(saved: SavedNetwork) -> str:
    """Return as Markdown all scores of these weights in the checkpoint's folder (fid.json, fid-1.json, …)."""
    tables = []
    for path in sorted(saved.found.folder.glob("fid*.json")):
        scores = json.loads(path.read_text(encoding="utf-8"))
        told = scores["settings"] | scores
        how = f"{sampler_told(told)}, {told.get('steps')} steps, guidance {told.get('guidance')}"
        tables += [f"{path.stem}: {how}\n{table(scores)}"] * (told.get("weights", saved.weights) == saved.weights)
    return "\n\n".join(f"```\n{part}\n```" for part in tables) or "None recorded beside the checkpoint."
