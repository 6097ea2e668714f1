"""Imports plugins: user modules, named by the setting `plugins`, that add architectures, optimizers, metrics and so on.

schema.read imports them before it reads other keys. Resuming, sampling and scoring import those that training did."""

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from tread.runtime.files import content_hash

_imported: dict[str, tuple[str, str]] = {}  # file or module name → its absolute() form, sha256 of its source


def import_plugins(names: Sequence[str]) -> None:
    """Import modules by dotted names or paths of .py files, each once per process. A file is skipped if a file of the
    same name was imported before and this one is missing or has the same content. Raises ValueError if a module can't
    be imported, or if a different file of the same name, with other content, was imported before."""
    for name in names:
        place, module = absolute(name), Path(name).name
        if module in _imported and (place in sys.modules or not Path(place).is_file()):
            continue
        try:
            if name.endswith(".py"):
                source = Path(place).read_bytes()  # the bytes that are hashed are run: Python's cache may be older
                if module in _imported and _imported[module][1] != content_hash(source):
                    raise ImportError(f"{_imported[module][0]} was imported before, a different file of this name")
                if module in _imported:
                    continue
                sys.modules[place] = module_from_spec(spec_from_file_location(place, place))
                exec(compile(source, place, "exec"), sys.modules[place].__dict__)
            else:
                file = importlib.import_module(name).__file__
                source = Path(file).read_bytes() if file else b""
            _imported[module] = place, content_hash(source)
        except Exception as error:
            sys.modules.pop(place, None)
            said = f"plugins names {name}, which can't be imported: {type(error).__name__}: {error}"
            raise ValueError(f"{said}; it must be a module that Python finds, or the path of a .py file") from error


def plugin_hashes(names: Sequence[str]) -> dict[str, str]:
    """Return {file name or module: sha256 of its source} for the plugins `names`, which must have been imported."""
    return {Path(name).name: _imported[Path(name).name][1] for name in names}


def plugin_changes(info: Mapping) -> list[str]:
    """Return [a warning] if imported plugins differ from the record in `info`, a checkpoint's info.json, else []."""
    recorded = info.get("plugins", {}).items()
    changed = [name for name, digest in recorded if name in _imported and _imported[name][1] != digest]
    return [f"plugin {', '.join(changed)} has changed since the checkpoint was saved, by its sha256"] if changed else []


def check_plugin(name: str, folder: Path) -> str:
    """Return `name`, a plugin that the checkpoint in `folder` needs. Raises ValueError for a .py file that is
    missing, or lies in `folder` or in the run's folder around it: code that comes with a checkpoint is imported only if
    the user's setting `plugins` names it. No error is raised if a file of the same name was imported before."""
    file, above = Path(name).name, folder.resolve().parent
    run = above if folder.name.startswith("step_") and (above / "run.json").exists() else folder
    elsewhere = Path(name).is_file() and run.resolve() not in Path(name).resolve().parents
    if not name.endswith(".py") or file in _imported or elsewhere:
        return name
    near = next((place for place in (Path(name), folder / file, run / file, Path(file)) if place.is_file()), None)
    if near is None:
        where = " or ".join(dict.fromkeys(map(str, (folder, run, Path.cwd()))))
        raise ValueError(f"it needs the plugin {file}, which is neither {name} nor in {where}")
    why = "lies beside the checkpoint" if near == Path(name) else "is gone"
    raise ValueError(f"it needs the plugin {name}, which {why}: plugins=[{near}] imports this one, if you trust it")


def absolute(name: str) -> str:
    """Return a plugin's name in the form that runs record: a module's name, or the absolute path of a .py file."""
    return str(Path(name).expanduser().resolve()) if name.endswith(".py") else name
