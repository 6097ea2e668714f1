"""How well pictures fit their captions: the CLIP score, 100·max(cos, 0) of CLIP's two embeddings (arXiv 2104.08718).

Its authors multiply by 2.5 and not by 100; with 100 it is the number that text-to-image papers print. ViT-L/14's and
ViT-B/32's differ: fid.json has the hash of the weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tread.encoders.autoencoder import fingerprint
from tread.encoders.pretrained import load_whole, pretrained
from tread.runtime.device import exact

AT_ONCE = 64  # pictures in one pass


class ClipScore:
    """CLIP, both towers, in fp32.

    name    a hub id, or a folder as transformers saves it.
    sha256  of its weights and its vocabulary.

    Raises ValueError or OSError if it can't be had.
    """

    def __init__(self, name: str, device: torch.device | str) -> None:
        self._model, self._tokenizer, self._processor = _load_clip(name)
        self._model = self._model.to(device).eval().requires_grad_(False)
        self._device = device
        vocabulary = json.dumps(sorted(self._tokenizer.get_vocab().items()))
        self.sha256 = hashlib.sha256((fingerprint(self._model) + vocabulary).encode()).hexdigest()

    @torch.no_grad()
    def score(self, pictures: Tensor, captions: Sequence[str]) -> np.ndarray:
        """(n,) float32 of pictures (n, 1 or 3, H, W) uint8, each with its caption; long ones are cut off by CLIP."""
        length, scores = self._model.config.text_config.max_position_embeddings, []
        cut = {"truncation": True, "max_length": length, "padding": "max_length"}
        for start in range(0, len(pictures), AT_ONCE):
            rgb = pictures[start : start + AT_ONCE].cpu().expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()
            x = self._processor(images=list(rgb), input_data_format="channels_last", return_tensors="pt")
            words = self._tokenizer(list(captions[start : start + AT_ONCE]), **cut, return_tensors="pt")
            with exact():
                made = self._model(
                    input_ids=words["input_ids"].to(self._device),
                    attention_mask=words["attention_mask"].to(self._device),
                    pixel_values=x["pixel_values"].float().to(self._device),
                )
            cosine = F.cosine_similarity(made.image_embeds.float(), made.text_embeds.float())
            scores.append(100 * cosine.clamp(min=0).cpu())
        return torch.cat(scores).numpy()


def _load_clip(name: str) -> tuple[torch.nn.Module, Any, Any]:
    """transformers' CLIPModel in fp32, its tokenizer and what prepares its pictures. Raises ValueError."""
    known = (
        "It must be a hub id (to be downloaded once while online) or a folder of a whole CLIP, such as "
        "openai/clip-vit-large-patch14"
    )
    with pretrained(f"clip={name}", name, "requirements-text.txt", known) as (transformers, told):
        # by Pillow, as CLIP's own code resizes; newer releases have it under a name of its own
        processor = getattr(transformers, "CLIPImageProcessorPil", transformers.CLIPImageProcessor)
        kind = transformers.AutoConfig.from_pretrained(name, **told).model_type
        if kind != "clip":
            raise ValueError(f"it is a {kind}, and not a clip, which has a tower for pictures and one for text")
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **told)
        prepared = processor.from_pretrained(name, **told)
        return load_whole(transformers.CLIPModel, name, told), tokenizer, prepared
