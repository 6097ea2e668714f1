"""What Hydra refuses, told in one line: words that are no settings, choices and values that it can't take."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from tread.runtime.foreign_names import ours

QUOTES = "'\""
_ALONE = ("--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m", "--shell-completion", "-sc")
_WITH_WORD = ("--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd")
_WITH_WORD += ("--experimental-rerun",)
_WITH_CHOICE = dict.fromkeys(("--cfg", "-c"), ("job", "hydra", "all"))
_WITH_CHOICE |= dict.fromkeys(("--info", "-i"), ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"))


def check_words(words: Sequence[str], known: Sequence[str] = ()) -> list[str]:
    """The overrides among a command line's words, without Hydra's own options.

    known  the door's keys.

    Raises ValueError for a word that is neither.
    """
    found, before = [], ""
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
            found.append(word)
        before = word if word in (*_WITH_WORD, *_WITH_CHOICE) else ""
    if before in (*_WITH_WORD, "--cfg", "-c"):
        raise ValueError(f"{before} needs a word behind it")
    return found


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
    said = [text for one in (error, error.__cause__) if one for text in str(one).splitlines()[:2]]
    said = [text.strip(" .") for text in said if not re.match(r" +(full_key|object_type)", text)]
    text = "; ".join(filter(None, said)) or type(error).__name__
    return text.replace("list index out of range", "the list has no such entry (they count from 0)")
