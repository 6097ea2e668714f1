"""User modules named by the setting `plugins`, which add entries to this code's tables when they are imported.

schema.read imports a config's plugins before it looks at any other key. The configs of runs and checkpoints name them,
so training, resuming, sampling and scoring know the same entries.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_imported: set[str] = set()  # names of files


def import_plugins(names: Sequence[str]) -> None:
    """Import modules by dotted names or paths of .py files, each once per process. A missing file is skipped if a
    plugin of the same name was imported before. Raises ValueError, with the reason, for a module that can't be
    imported."""
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
    """Return a plugin's name in the form that runs record: a module's name, or the absolute path of a .py file."""
    return str(Path(name).expanduser().resolve()) if name.endswith(".py") else name
