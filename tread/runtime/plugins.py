"""A user's modules, named by the setting `plugins`: importing one is where it adds its entries to our tables.

schema.read imports what a config names before it looks at any other key, so that training, resuming, sampling and
scoring know the same entries: the config of a run or checkpoint names them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_imported: set[str] = set()  # names of files


def import_plugins(names: Sequence[str]) -> None:
    """Import modules, each once a process: dotted names that Python finds, or paths of .py files.

    A file that is not there any more counts as imported where one of its name was, from another place.

    Raises ValueError for one that can't be imported, with the reason.
    """
    for name in names:
        place, module = absolute(name), Path(name).name
        if place in sys.modules or (module in _imported and not Path(place).is_file()):
            continue
        try:
            if not name.endswith(".py"):
                importlib.import_module(name)
                continue
            spec = spec_from_file_location(place, place)
            sys.modules[place] = module_from_spec(spec)
            spec.loader.exec_module(sys.modules[place])
            _imported.add(module)
        except Exception as error:
            sys.modules.pop(place, None)
            raise ValueError(
                f"plugins names {name}, which can't be imported: {type(error).__name__}: {error}; it must be a module "
                "that Python finds (PYTHONPATH), or the path of a .py file: plugins=[…] says where it is now"
            ) from error


def absolute(name: str) -> str:
    """A plugin's name as a record has it: paths from the root, so that they hold in any folder."""
    return str(Path(name).expanduser().resolve()) if name.endswith(".py") else name
