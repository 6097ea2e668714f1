"""What every door does around its work: looks at its command line, before Hydra, and explains how it ended."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tread.runtime import door_help
from tread.runtime.hydra_errors import check_words, in_one_line
from tread.runtime.schema import check_overrides
from tread.runtime.signals import leave_at_once

PRINTS = {"--cfg", "-c", "--info", "-i", "--help", "-h", "--hydra-help"}  # flags by which Hydra prints, and no more


def open_door(
    main: Callable[[], None],
    known: Iterable[str],
    moved: Mapping[str, str] | None = None,
    literal: Collection[str] = (),
) -> None:
    """Run a door's Hydra `main`, answer --help, or end with a message that names the nearest known key, or its heir.

    known    dotted keys.
    moved    keys that are gone → what to set in their place.
    literal  keys whose text is taken as it stands behind the =, see `take_literally`.

    What Hydra refuses is told in one line too; HYDRA_FULL_ERROR=1 shows where it came from.
    """
    if PRINTS & {*sys.argv[1:]}:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Hydra would answer a closed pipe by a traceback
    known, door = list(known), main.__wrapped__.__globals__
    asked = os.environ.get("HYDRA_FULL_ERROR")
    with explained():
        answer_help(door["__doc__"], Path(door["__file__"]))
        sys.argv[1:] = take_literally(sys.argv[1:], literal)
        check_overrides(check_words(sys.argv[1:], known), known, moved)
        os.environ["HYDRA_FULL_ERROR"] = "1"  # so that it hands its errors on
        try:
            main()
        except Exception as error:
            frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
            if asked or main.__wrapped__.__code__ in frames:  # the door's own, which has composed its config
                raise
            sys.exit(f"error: {in_one_line(error)}")
    leave_at_once(0)


def spell_folder(word: str) -> str:
    """dataset=<folder> for Hydra, which knows it as the choice of a file in configs/dataset/: dataset.path=<folder>."""
    return word.replace("dataset=", "dataset.path=", 1) if word.startswith("dataset=") else word


def take_literally(words: Iterable[str], keys: Collection[str]) -> list[str]:
    """A command line's words, those of some keys so that Hydra's grammar meets nothing of their text.

    `plain` has the text again, whatever commas, quotes, signs, braces or $ are in it.
    """
    parted = [(word, *word.partition("=")) for word in words]
    return [
        f"{key}=${{literal:x{os.fsencode(text).hex()}}}" if equals and key in keys else word
        for word, key, equals, text in parted
    ]


OmegaConf.register_new_resolver("literal", lambda word: os.fsdecode(bytes.fromhex(word[1:])), replace=True)


def config_of(door: Path) -> Path:
    """The config file of a door: of its name, in the configs/ beside it or beside its folder."""
    places = [place for place in (door.parent / "configs", door.parent.parent / "configs") if place.is_dir()]
    own = places[0] / f"{door.stem}.yaml"
    return own if own.is_file() else places[0] / "config.yaml"  # train.py's


def answer_help(doc: str, door: Path | None = None) -> None:
    """If the command line asks for help, print it and end.

    doc   the script's docstring.
    door  where it lies, if it has a config file: then its keys are shown too, and all of them by "--help all".
    """
    words = sys.argv[1:]
    if {"--help", "-h"} & set(words):
        text = doc.strip()
        if door:
            config = config_of(door)
            text = door_help.whole(config, words) if "all" in words else door_help.short(doc, config)
        sys.stdout.write(text.rstrip() + "\n")
        sys.exit(0)


def plain(composed: DictConfig) -> dict:
    """A composed config as nested dicts. Raises ValueError for a value that is needed or can't be found."""
    try:
        return OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ValueError(f"{error.full_key}=… is needed; the files in configs/ say what it is") from error
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key or 'settings'}: {in_one_line(error)}") from error


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
