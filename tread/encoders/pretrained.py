"""Loads frozen transformers models from the hub, its cache or a folder; refuses missing or wrongly shaped weights."""

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from tread.encoders.autoencoder import fingerprint
from tread.runtime.files import content_hash
from tread.runtime.hub import check_hub, check_id

TOKENIZER = ("AutoTokenizer",)


def load_pretrained(
    what: str,
    place: str,
    kinds: Mapping[str, str],
    requirements: str,
    known: str,
    others: str | None = None,
    parts: Sequence[Sequence[str]] = (),
    unused: str = "\0",
) -> tuple[nn.Module, list[Any]]:
    """Return a frozen model, in fp32 and eval mode, and a list of further parts such as its tokenizer.

    what, known   for error messages: what is loaded, and a sentence on the possible choices.
    place         a hub id or a folder.
    kinds         model type in config.json → name of the transformers class.
    requirements  the requirements file to install if transformers is missing, for error messages.
    others        name of the class for model types not in `kinds`; None: these are refused. Encoder-decoders and models
                  without a hidden_size are always refused unless `kinds` has their type.
    parts         for each further part, possible class names; the first one in the installed transformers is used.
    unused        name prefix of weights that are never used: missing ones are set to 0. By default none may be missing.

    Raises ValueError if the model can't be loaded, lacks weights, has weights of other shapes or lacks its tokenizer.
    """
    try:
        import transformers  # imported here because it takes seconds and is optional
        from transformers.utils import logging
    except ImportError as error:
        raise ValueError(f"{what} needs transformers: pip install -r {requirements} ({error})") from error

    def load(**where: bool) -> tuple[Any, str, list[Any], nn.Module, dict]:
        config = transformers.AutoConfig.from_pretrained(place, **where)
        single = not config.is_encoder_decoder and hasattr(config, "hidden_size")
        kind = kinds.get(config.model_type, others if single else None)
        if kind is None:
            raise ValueError(f"it is a {config.model_type}, and not a {' or '.join(kinds)}")
        classes = [next((n for n in names if hasattr(transformers, n)), names[0]) for names in parts]
        beside = [getattr(transformers, name).from_pretrained(place, **where) for name in classes]
        made = getattr(transformers, kind).from_pretrained(place, **where, output_loading_info=True)
        return config, kind, beside, *made

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_id(place)
            try:
                config, kind, beside, model, loading = load(local_files_only=True)
            except OSError:
                if Path(place).is_dir():
                    raise
                check_hub()
                config, kind, beside, model, loading = load(local_files_only=False)
    except (OSError, ValueError, LookupError, AttributeError, RuntimeError, ImportError, SafetensorError) as error:
        raise ValueError(f"{what} could not be loaded: {str(error).strip()}\n{known}") from error
    finally:
        logging.set_verbosity(before)
        logging.enable_progress_bar()
    missing = [key for key in sorted(loading["missing_keys"]) if not key.startswith(unused)]
    if odd := missing + sorted(map(str, loading["mismatched_keys"])):
        raise ValueError(f"{what} lacks weights of a {kind}, or has others: {', '.join(odd[:3])}, …")
    if any(2 * len(part) < config.get_text_config().vocab_size for part in beside if hasattr(part, "get_vocab")):
        raise ValueError(f"{what} lacks its tokenizer's files (tokenizer.json, spiece.model, …): add them")
    for key in loading["missing_keys"]:  # unused, and drawn anew at every load: the hash must not depend on them
        model.get_parameter(key).data.zero_()
    return model.float().eval().requires_grad_(False), beside


def hash_of_text_model(model: nn.Module, tokenizer: Any) -> str:
    """Return the hex sha256 of a model's weights and its tokenizer's vocabulary."""
    return content_hash(fingerprint(model) + json.dumps(sorted(tokenizer.get_vocab().items())))
