"""What every door does around its work: looks at its command line, before Hydra, and explains how it ended."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf

from tread.runtime.schema import check_overrides
from tread.runtime.signals import leave_at_once

PRINTS = {"--cfg", "-c", "--info", "-i", "--help", "-h", "--hydra-help"}  # flags by which Hydra prints, and no more


def open_door(main: Callable[[], None], known: Iterable[str], moved: Mapping[str, str] | None = None) -> None:
    """Run a door's Hydra `main`, or end with a message that names the nearest known key, or where one has moved."""
    if PRINTS & {*sys.argv[1:]}:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Hydra would answer a closed pipe by a traceback
    with explained():
        check_overrides(sys.argv[1:], known, moved)
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
    """End the process with a line, and no traceback, at bad input, at what the system refuses, and at Ctrl-C (130).

    Where nobody reads the output any more, as behind `| head -1`, it ends without a word (141).

    stopped  what to say at Ctrl-C.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        sys.exit(128 + signal.SIGPIPE)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except torch.OutOfMemoryError as error:
        sys.exit(f"error: {error}\nA smaller batch_size needs less; what was finished before is kept")
    except KeyboardInterrupt:
        sys.stderr.write(f"{stopped}\n")
        sys.exit(128 + signal.SIGINT)
    finally:
        _drop_what_nobody_reads()


def _drop_what_nobody_reads() -> None:
    """Of output whose pipe is closed, so that Python does not complain when it ends and writes what is left."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
