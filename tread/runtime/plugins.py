"""A user's modules, named by the setting `plugins`, which add entries to our tables when they are imported.

schema.read imports what a config names before it looks at any other key. The config of a run or checkpoint names
them, so training, resuming, sampling and scoring know the same entries.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_imported: set[str] = set()  # names of files


def import_plugins(names: Sequence[str]) -> None:
    """Import modules, each once a process: dotted names that Python finds, or paths of .py files.

    A file that has moved is not imported again if one of its name was.

    Raises ValueError for one that can't be imported, with the reason.
    """
    for name in names:
        place, module = absolute(name), Path(name).name
        if place in sys.modules or (module in _imported and not Path(place).is_file()):
            continue
        try:
            if name.endswith(".py"):
                spec = spec_from_file_location(place, place)
                sys.modules[place] = module_from_spec(spec)
                spec.loader.exec_module(sys.modules[place])
                _imported.add(module)
            else:
                importlib.import_module(name)
        except Exception as error:
            sys.modules.pop(place, None)
            raise ValueError(
                f"plugins names {name}, which can't be imported: {type(error).__name__}: {error}; it must be a module "
                "that Python finds, or the path of a .py file"
            ) from error


def absolute(name: str) -> str:
    """A plugin's name as a run records it: the paths of files are absolute."""
    return str(Path(name).expanduser().resolve()) if name.endswith(".py") else name
