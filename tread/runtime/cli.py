"""What every entry point does around its work: it checks its command line before Hydra does, answers --help, and
explains in one line how it ended. --help is composed of the script's docstring and its config file's own comments.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from omegaconf import DictConfig, ListConfig, MissingMandatoryValue, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tread.runtime.foreign_names import ours
from tread.runtime.plugins import import_plugins
from tread.runtime.schema import check_overrides
from tread.runtime.signals import leave_at_once

PRINTS = {"--cfg", "-c", "--info", "-i", "--help", "-h", "--hydra-help"}  # flags by which Hydra prints, and no more


def open_door(
    main: Callable[[], None],
    known: Iterable[str] | Callable[[], Iterable[str]],
    literal: Collection[str] = (),
    spell: Callable[[Iterable[str]], list[str]] = list,
) -> None:
    """Run a script's Hydra `main`, answer --help, or end with a message that names the nearest known key.

    known    dotted keys; a function is called when the plugins are imported, which may add some.
    literal  keys whose text is taken as it stands behind the =, see `take_literally`.
    spell    writes overrides as Hydra takes them.

    What Hydra refuses is told in one line too; HYDRA_FULL_ERROR=1 shows where it came from.
    """
    if PRINTS & {*sys.argv[1:]}:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Hydra would answer a closed pipe by a traceback
    script = main.__wrapped__.__globals__
    asked = os.environ.get("HYDRA_FULL_ERROR")
    with explained():
        answer_help(script["__doc__"], Path(script["__file__"]))
        import_plugins(named_plugins(sys.argv[1:], config_file(Path(script["__file__"]))))
        known = list(known() if callable(known) else known)
        sys.argv[1:] = spell(take_literally(sys.argv[1:], literal))
        check_overrides(check_words(sys.argv[1:], known), known)
        os.environ["HYDRA_FULL_ERROR"] = "1"  # so that it hands its errors on
        try:
            main()
        except Exception as error:
            frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
            if asked or main.__wrapped__.__code__ in frames:  # the script's, whose config is composed by then
                raise
            sys.exit(f"error: {in_one_line(error)}")
    leave_at_once(0)


def named_plugins(words: Iterable[str], config: Path) -> list[str]:
    """What a command line, or else an entry point's config file, names under `plugins`; their keys are known, too."""
    typed = [word.lstrip("+") for word in words if re.match(r"\+*plugins=", word)]
    with contextlib.suppress(Exception):  # what can't be read Hydra and the settings refuse, with the reason
        given = OmegaConf.merge(OmegaConf.load(config), OmegaConf.from_dotlist(typed)).get("plugins")
        return list(given) if isinstance(given, ListConfig) else []
    return []


@contextlib.contextmanager
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
    """Redirect output whose pipe is closed, so that Python does not complain when it ends and writes what is left."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def spell_folder(words: Iterable[str]) -> list[str]:
    """dataset=<folder> for Hydra, which knows it as the choice of a file in configs/dataset/: dataset.path=<folder>."""
    return [re.sub("^dataset=", "dataset.path=", word) for word in words]


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


def plain(composed: DictConfig) -> dict:
    """A composed config as nested dicts. Raises ValueError for a value that is needed or can't be found."""
    try:
        return OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ValueError(f"{error.full_key}=… is needed; the files in configs/ say what it is") from error
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key or 'settings'}: {in_one_line(error)}") from error


_ALONE = ("--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m", "--shell-completion", "-sc")
_WITH_WORD = ("--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd")
_WITH_WORD += ("--experimental-rerun",)
_WITH_CHOICE = dict.fromkeys(("--cfg", "-c"), ("job", "hydra", "all"))
_WITH_CHOICE |= dict.fromkeys(("--info", "-i"), ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"))


def check_words(words: Sequence[str], known: Sequence[str] = ()) -> list[str]:
    """The overrides among a command line's words, without Hydra's own options.

    known  the script's keys.

    Raises ValueError for a word that is neither.
    """
    overrides, before = [], ""
    for word in words:
        option, equals, value = word.partition("=")
        if before in _WITH_WORD or (before in _WITH_CHOICE and word in _WITH_CHOICE[before]):
            word = ""
        elif before in ("--cfg", "-c") or (option in _WITH_CHOICE and equals and value not in _WITH_CHOICE[option]):
            choices = ", ".join(_WITH_CHOICE[before or option])
            raise ValueError(f"{before or option} is followed by {value or word!r}, but must be by one of {choices}")
        elif word.startswith("-") and option not in (*_ALONE, *_WITH_WORD, *_WITH_CHOICE):
            name = option.lstrip("-").replace("-", "_")
            told = f"; {told}" if name not in known and (told := ours(name, known)) else f": {name}={value or '…'}"
            raise ValueError(f"{word} is no option: settings are written key=value, without dashes{told}")
        elif not word.startswith("-"):
            if not (equals and option) and not word.startswith("~"):
                raise ValueError(f"{word!r} is no setting: they are written key=value, without blanks around the =")
            overrides.append(word)
        before = word if word in (*_WITH_WORD, *_WITH_CHOICE) else ""
    if before in (*_WITH_WORD, "--cfg", "-c"):
        raise ValueError(f"{before} needs a word behind it")
    return overrides


QUOTES = "'\""


def in_one_line(error: Exception) -> str:
    """What to tell of an error that Hydra, OmegaConf or YAML raised while a config was composed."""
    if missing := getattr(error, "missing_cfg_file", None):
        group, _, choice = missing.rpartition("/")
        options = getattr(error, "options", None)
        if not options:
            return f"there is no config {missing}"
        nearest = max(options, key=lambda option: difflib.SequenceMatcher(None, choice, option).ratio())
        return f"there is no {group}={choice}; the nearest is {nearest}; there are {', '.join(options)}"
    if given := getattr(error, "override", None):
        key, _, value = given.partition("=")
        return f"{given} can't be read; as text it is written \"{key}='{value.strip(QUOTES)}'\", both quotes included"
    if mark := getattr(error, "problem_mark", None):  # YAML's
        return f"{Path(mark.name)}, line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    if isinstance(error, UnicodeDecodeError):
        return f"a file of configs/ is not UTF-8: {error}"
    if str(error).startswith("Config group override"):
        return "a choice such as model=… is one of a file, not null; ~experiment takes one away"
    said = [text for raised in (error, error.__cause__) if raised for text in str(raised).splitlines()[:2]]
    said = [text.strip(" .") for text in said if not re.match(r" +(full_key|object_type)", text)]
    text = "; ".join(filter(None, said)) or type(error).__name__
    return text.replace("list index out of range", "the list has no such entry (they count from 0)")


def answer_help(doc: str, script: Path | None = None) -> None:
    """If the command line asks for help, print it and end.

    doc     the script's docstring.
    script  its file, if it has a config file: then its keys are shown too, and all of them by "--help all".
    """
    words = sys.argv[1:]
    if {"--help", "-h"} & set(words):
        text = doc.strip()
        if script:
            config = config_file(script)
            text = whole_help(config, words) if "all" in words else short_help(doc, config)
        sys.stdout.write(text.rstrip() + "\n")
        sys.exit(0)


def config_file(script: Path) -> Path:
    """A script's config file: of its name, in the configs/ beside it or beside its folder."""
    folder = next(folder for folder in (script.parent / "configs", script.parent.parent / "configs") if folder.is_dir())
    config = folder / f"{script.stem}.yaml"
    return config if config.is_file() else folder / "config.yaml"  # train.py's


def short_help(doc: str, config: Path) -> str:
    """What a script does, usual overrides, and the keys of its config file; at most 60 lines of 120 columns.

    doc     the script's docstring.
    config  its config file: its head, up to the first blank line, has the overrides, and each key a comment.
    """
    head, _, body = config.read_text().partition("\n\n")
    told = [line.removeprefix("#").removeprefix(" ") for line in head.splitlines()]
    lines = [doc.strip(), "", *(line for line in told if not line or line not in doc), "", "Keys that are set most:"]
    entries = list(_entries(body))
    width = min(24, max(len(entry) for entry, _ in entries))
    for entry, said in entries:
        group = config.parent / entry.partition("=")[0]
        if others := [name for name in _choices(group) if not re.search(rf"\b{name}\b", said)]:
            said += f"; also {', '.join(others)}"
        lines += textwrap.wrap(f"  {entry:<{width}}  {said}", 120, subsequent_indent=" " * (width + 4))
    lines += ["", "--help all: every key with its comment. --cfg job: the values that a command would have."]
    text = "\n".join([*lines, f"The files are in {config.parent}"])
    if config.parent.parent.name == "doors":  # a wheel's, whose scripts are commands
        text = re.sub(r"(accelerate launch|python) (train|sample|fid)\.py", r"tread-\2", text)
    return text


def _choices(group: Path) -> list[str]:
    return sorted(path.stem for path in group.glob("*.yaml"))


# a key, maybe commented out or an entry of the defaults list; its value; what the file says of it
_LINE = re.compile(
    r"(?P<off># )?(?P<indent> *)(?P<group>- (override )?/?)?(?P<key>[\w/]+):"
    r"(?P<value> +[^#\s][^#]*?)?( +# (?P<said>.*))?"
)
_MORE = re.compile(r" {5,}# (.*)")  # a comment that goes on


def _entries(body: str) -> Iterator[tuple[str, str]]:
    """(dotted key=value, comment) of a config file's keys; those commented out have no value."""
    section, entries = "", []
    for line in body.partition("\nhydra:")[0].splitlines():
        if (more := _MORE.fullmatch(line)) and entries:
            entries[-1][1] += " " + more[1]
        match = _LINE.fullmatch(line)
        if match is None or match["key"].startswith("hydra"):
            continue
        if not match["indent"]:
            section = ""
        if match["value"] is None:
            section = match["key"] + "."
            continue
        name = match["key"] if match["group"] else section + match["key"]
        value = match["value"].strip().replace("???", "…")
        entries.append([name if match["off"] else f"{name}={value}", match["said"] or ""])
    return map(tuple, entries)


def whole_help(config: Path, words: Sequence[str]) -> str:
    """The text of a config file and of all that it is combined of, by the choices of a command line."""
    choices = dict(word.split("=", 1) for word in words if "=" in word)
    return "\n".join(f"# ---- {path}\n{path.read_text()}" for path in dict.fromkeys(_files(config, choices)))


def _files(config: Path, choices: dict[str, str]) -> Iterator[Path]:
    """A config file and those of its defaults list, in its order; the choices of the outermost file count."""
    listed = re.search(r"^defaults:.*\n((?: +[-#] .*\n)+)", config.read_text(), re.M)
    entries = []  # of files, and (group, choice)
    for line in listed[1].splitlines() if listed else ():
        match = _LINE.fullmatch(line)
        entries.append((match["key"], match["value"].strip()) if match else line.split("#")[0].strip(" -"))
    for group, choice in (entry for entry in entries if not isinstance(entry, str)):
        choices.setdefault(group, choice)
    yield config
    for entry in entries:
        name = entry if isinstance(entry, str) else f"{entry[0]}/{choices[entry[0]]}"
        if (path := config.parent / f"{name}.yaml").is_file():
            yield from _files(path, choices)
