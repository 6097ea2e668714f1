"""The command line of every script: checks overrides, answers --help, imports plugins, reports errors in one line."""

import contextlib
import functools
import inspect
import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, ListConfig, MissingMandatoryValue, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tread.runtime import schema
from tread.runtime.plugins import import_plugins
from tread.runtime.signals import leave_at_once

ONE_EACH = "one command for each value, each with its own name="
AT_HOME = re.compile(r"(?:(?<==)|(?<==['\"]))~(?=/)")


def door(kind: type | None = None, stopped: str = "stopped") -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """Return a decorator that turns a script's main(options) into a function without arguments. In that function Hydra
    composes the options from the script's config file in configs/ and the command line. ValueError, OSError and a lack
    of GPU memory end the script with a message and no traceback; Ctrl-C prints `stopped`. `kind` is the dataclass of
    the options; None: main gets the composed config as nested dicts."""
    import hydra  # imported here because it takes long, and not every script has a config

    def decorate(work: Callable[[Any], None]) -> Callable[[], None]:
        @functools.wraps(work)
        def main(composed: DictConfig) -> None:
            with explained(stopped):
                tree = plain(composed)
                work(schema.read(tree, kind) if kind else tree)

        config = config_file(Path(work.__globals__["__file__"]).resolve())
        opened = hydra.main(version_base="1.3", config_path=str(config.parent), config_name=config.stem)(main)
        opened.kind = kind
        return opened

    return decorate


def open_door(
    main: Callable[[], None],
    known: Iterable[str] | Callable[[], Iterable[str]] | None = None,
    literal: Collection[str] = (),
    spell: Callable[[Iterable[str]], list[str]] = list,
) -> None:
    """Run a script, which may get plugins=[…]: answer --help, import plugins, check the overrides in sys.argv, and call
    `main`, which `door` decorated. Hydra's errors end it without a traceback, unless HYDRA_FULL_ERROR=1 is set.

    known    dotted keys that overrides may set, or a function that returns them, called once plugins are imported, as
             these may add keys; None: the keys of the dataclass that `door` was given.
    literal  keys whose values Hydra must not parse, as they may hold commas, quotes, braces or $.
    spell    function that gets the overrides and returns them as Hydra needs them, e.g. spell_folder.
    """
    script = inspect.unwrap(main).__globals__
    config = config_file(Path(script["__file__"]).resolve())
    full_error = os.environ.get("HYDRA_FULL_ERROR")
    with explained():
        answer_help(script["__doc__"], config)
        if {"-m", "--multirun"} & {*sys.argv[1:]}:
            raise ValueError(f"-m and --multirun would run the first value alone: give {ONE_EACH}")
        given = [(word, word.partition("=")[0] in literal) for word in sys.argv[1:]]
        words = [word if raw else AT_HOME.sub(lambda _: os.path.expanduser("~"), word, 1) for word, raw in given]
        import_plugins(named_plugins(words, config))
        known = schema.known_keys(main.kind) if known is None else [*(known() if callable(known) else known)]
        words = [word for word in words if "plugins" in known or not re.match(r"\+*plugins=\[.*\]$", word)]
        sys.argv[1:] = spell(take_literally(words, literal))
        schema.check_overrides(sys.argv[1:], known)
        if {"--cfg", "-c"} & {word.partition("=")[0] for word in sys.argv[1:]}:
            sys.stderr.write("--cfg prints the composed values, without checks; a run also checks them\n")
        os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise its errors instead of printing them
        try:
            main()
        except Exception as error:
            if full_error or type(error).__module__.partition(".")[0] not in ("hydra", "omegaconf", "yaml"):
                raise
            word = getattr(error, "override", "")  # the override, which Hydra's message leaves out
            told = "\n".join(f"error: {part}" for part in (word, error, error.__cause__) if part)
            sys.exit(re.sub("To sweep over it, add --multirun.*", f"For several runs, give {ONE_EACH}", told))
    leave_at_once(0)


def config_folders(words: Sequence[str]) -> list[Path]:
    """Return the folders that the command-line arguments `words` name by --config-dir or -cd."""
    parts = [part for word in words for part in word.split("=", word.startswith(("--config-dir=", "-cd=")))]
    return [Path(after) for name, after in zip(parts, parts[1:]) if name in ("--config-dir", "-cd")]


def named_plugins(words: list[str], config: Path) -> list[str]:
    """Return the plugins that the command-line arguments `words` name by plugins=…, else those that an experiment in
    them or the config file names. Returns [] if one can't be parsed; the script reports that error later."""
    typed = [word.lstrip("+") for word in words if re.match(r"\+*plugins=", word)]
    names = [f"experiment/{found[1]}.yaml" for word in words if (found := re.match(r"\+*experiment=(.+)", word))]
    places = product([config.parent, *config_folders(words)], names)
    files = [path for folder, name in places if (path := folder / name).is_file()]
    with contextlib.suppress(Exception):  # a config that can't be read is refused later, with the reason
        plugins = OmegaConf.merge(*map(OmegaConf.load, [config, *files]), OmegaConf.from_dotlist(typed)).get("plugins")
        return list(plugins) if isinstance(plugins, ListConfig) else []
    return []


@contextlib.contextmanager
def explained(stopped: str = "stopped") -> Iterator[None]:
    """Context that ends the process with a message and no traceback after ValueError, OSError, a lack of GPU memory
    (exit code 1) or Ctrl-C (130; prints `stopped`), and silently (141) if the output pipe is closed, as by `| head`."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        sys.exit(128 + signal.SIGPIPE)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except torch.OutOfMemoryError as error:
        sys.exit(f"error: {error}\nA smaller batch_size needs less memory; work finished before is kept")
    except KeyboardInterrupt:
        sys.stderr.write(f"{stopped}\n")
        sys.exit(128 + signal.SIGINT)
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BrokenPipeError:  # else Python reports the closed pipe again at its exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def spell_folder(words: Iterable[str]) -> list[str]:
    """Rewrite dataset=<folder> to dataset.path=<folder>, since for Hydra dataset=… names a file in configs/dataset/."""
    return [re.sub("^dataset=", "dataset.path=", word) for word in words]


def take_literally(words: Iterable[str], keys: Collection[str]) -> list[str]:
    """Return command-line arguments with the values of `keys` encoded, so that Hydra does not parse special characters
    in these values, such as commas, quotes, braces or $. `plain` decodes the values."""
    return [
        f"{key}=${{literal:x{os.fsencode(text).hex()}}}" if equals and key in keys else word
        for word, (key, equals, text) in ((word, word.partition("=")) for word in words)
    ]


OmegaConf.register_new_resolver("literal", lambda word: os.fsdecode(bytes.fromhex(word[1:])), replace=True)


def plain(composed: DictConfig) -> dict:
    """Convert a composed config to nested dicts. Raises ValueError for a value that is missing or can't be resolved."""
    try:
        return OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ValueError(f"{error.full_key}=… is needed; the files in configs/ say what it is") from error
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key}: {error}".partition("\n")[0]) from error


def config_file(script: Path) -> Path:
    """Return configs/<script's name>.yaml, else configs/config.yaml; configs/ is next to the script or one level up."""
    folder = next(folder for folder in (script.parent / "configs", script.parent.parent / "configs") if folder.is_dir())
    config = folder / f"{script.stem}.yaml"
    return config if config.is_file() else folder / "config.yaml"


def read_choice(configs: Path, group: str, name: str) -> dict:
    """Return the settings in configs/<group>/<name>.yaml. Raises ValueError for a name that is not there."""
    names = sorted(path.stem for path in (configs / group).glob("*.yaml"))
    if name not in names:
        raise ValueError(f"{group} is {name!r}, but must be one of {', '.join(names)}")
    return OmegaConf.to_container(OmegaConf.load(configs / group / f"{name}.yaml"))


def answer_help(doc: str, config: Path | None = None) -> None:
    """If sys.argv holds --help or -h, print `doc`, the script's docstring, and the config file `config` up to a line
    "# Below are …", and exit. "--help all" also prints the rest, and files in Hydra's defaults list without a group."""
    if not {"--help", "-h"} & {*sys.argv[1:]}:
        return
    parts, files = [doc.strip()], [config] if config else []
    for path in files:  # the loop appends to it
        parts.append(path.read_text().partition("\nhydra:")[0].strip())
        if "all" in sys.argv:
            names = re.findall(r"^  - (\w+) *(?:#.*)?$", parts[-1], re.M)
            files += [path.with_name(f"{name}.yaml") for name in names if name != "_self_"]
        else:
            parts[-1] = parts[-1].partition("\n\n# Below are ")[0]  # the keys above this line are those that people set
    if config:
        parts.append(f"--help all prints all keys; they are in {config.parent}. --cfg job prints a command's values.")
    text = "\n\n".join(parts) + "\n"
    if config and config.parent.parent.name == "doors":  # installed from a wheel: scripts are commands
        text = re.sub(r"(accelerate launch|python) (train|sample|fid)\.py", r"tread-\2", text)
    sys.stdout.write(text)
    sys.exit(0)
