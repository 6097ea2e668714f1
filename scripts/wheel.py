"""Lets a wheel hold train.py, sample.py, fid.py and configs/ in tread/doors, which pyproject.toml alone can't do."""

from pathlib import Path

from setuptools.command.build_py import build_py


class BuildWithDoors(build_py):
    """setuptools' build_py, which also copies train.py, sample.py, fid.py and configs/ into tread/doors, where the
    wheel's commands, such as tread-train, find them. An editable install needs no copies: it runs the originals."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source in ("train.py", "sample.py", "fid.py", *map(str, Path("configs").rglob("*.yaml"))):
                target = Path(self.build_lib, "tread", "doors", source)
                target.parent.mkdir(parents=True, exist_ok=True)
                self.copy_file(source, str(target))
