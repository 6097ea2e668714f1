"""Builds a wheel as pyproject.toml alone can't: the doors lie in its tread/doors, with configs/ beside them."""

from pathlib import Path

from setuptools.command.build_py import build_py

DOORS = ("train.py", "sample.py", "fid.py")


class BuildWithDoors(build_py):
    """Puts the doors where tread/doors/__init__.py looks for them; an editable install leaves them at the root."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source in (*DOORS, *map(str, Path("configs").rglob("*.yaml"))):
                target = Path(self.build_lib, "tread", "doors", source)
                target.parent.mkdir(parents=True, exist_ok=True)
                self.copy_file(source, str(target))
