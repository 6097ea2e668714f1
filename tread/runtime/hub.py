"""Names on Hugging Face's hub: what was fetched once is taken from the cache, and a silent hub is found out soon."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tread.runtime.network import check_answer

HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
WEIGHT_FILES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin")


def is_cached(name: str, weights: Sequence[str]) -> bool:
    """Whether a hub id's config.json and one of its files of weights are in the cache.

    Raises ValueError if it is no hub id, OSError if they are not there and the hub is silent.
    """
    from huggingface_hub import constants, try_to_load_from_cache  # imported here because it takes long
    from huggingface_hub.utils import get_session

    if not HUB_ID.fullmatch(name) or name.endswith(WEIGHT_FILES):
        raise ValueError("there is no such file or folder")
    there = {file for file in ("config.json", *weights) if isinstance(try_to_load_from_cache(name, file), str)}
    if "config.json" in there and len(there) > 1:
        return True
    check_answer(constants.ENDPOINT, lambda url, seconds: get_session().head(url, timeout=seconds).status_code)
    return False
