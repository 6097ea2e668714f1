"""What every door does around its work: looks at its command line, before Hydra, and explains how it ended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf

from tread.runtime.schema import check_overrides
from tread.runtime.signals import leave_at_once


def open_door(main: Callable[[], None], known: Iterable[str], moved: Mapping[str, str] | None = None) -> None:
    """Run a door's Hydra `main`, or end with a message that names the nearest known key, or where one has moved."""
    try:
        check_overrides(sys.argv[1:], known, moved)
    except ValueError as error:
        sys.exit(f"error: {error}")
    main()
    leave_at_once(0)


def plain(composed: DictConfig) -> dict:
    """A composed config as nested dicts. Raises ValueError for a value that must be given and is not."""
    try:
        return OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ValueError(f"{error.full_key}=… is needed; the files in configs/ say what it is") from error


@contextmanager
def explained(stopped: str = "stopped") -> Iterator[None]:
    """End the process with a line, and no traceback, at bad input, at what the system refuses, and at Ctrl-C.

    stopped  what to say at Ctrl-C.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except torch.OutOfMemoryError as error:
        sys.exit(f"error: {error}\nA smaller batch_size needs less; what was finished before is kept")
    except KeyboardInterrupt:
        sys.exit(stopped)
