"""What transformers loads by a hub id or from a folder: quietly, from the cache where it is there, whole or refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from safetensors import SafetensorError

from tread.runtime.hub import is_cached

WEIGHTS = ("model.safetensors", "pytorch_model.bin")


@contextmanager
def pretrained(what: str, place: str, requirements: str, known: str) -> Iterator[tuple[ModuleType, dict[str, bool]]]:
    """A context in which transformers reports nothing; it, and what its from_pretrained(place, …) is to be told.

    what, known   what is loaded, and which there are, for messages.
    requirements  the file that names transformers.

    Raises ValueError for what can't be loaded in it, or had.
    """
    try:
        import transformers  # imported here because it takes seconds, and is an extra
        from transformers.utils import logging
    except ImportError as error:
        raise ValueError(f"{what} needs transformers: pip install -r {requirements} ({error})") from error
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield transformers, {"local_files_only": Path(place).is_dir() or is_cached(place, WEIGHTS)}
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise ValueError(f"{what} could not be loaded: {str(error).strip()}\n{known}") from error
    finally:
        logging.set_verbosity(before)
        logging.enable_progress_bar()


def load_whole(kind: type, place: str, told: dict[str, bool], unused: str = "") -> Any:
    """A model of that class in fp32. Raises ValueError for lacking weights, but for those whose names begin so."""
    model, loading = kind.from_pretrained(place, **told, output_loading_info=True)
    lacking = [key for key in sorted(loading["missing_keys"]) if not (unused and key.startswith(unused))]
    if odd := lacking + sorted(map(str, loading["mismatched_keys"])):
        raise ValueError(f"it lacks weights of a {type(model).__name__}, or has others: {', '.join(odd[:3])}, …")
    return model.float()
