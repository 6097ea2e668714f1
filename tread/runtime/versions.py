"""Versions of Python, of the main packages and of this code, and the time, for a run's record."""

import datetime
import hashlib
import importlib.metadata
import platform
import subprocess
from pathlib import Path

PACKAGES = ("torch", "accelerate", "hydra-core", "diffusers", "numpy", "pillow", "scikit-learn", "safetensors")


def versions() -> dict[str, str]:
    """Return {name: version} for "python" and the main packages (or "not installed"); under "git", git_revision()."""
    numbers = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            numbers[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            numbers[package] = "not installed"
    return {**numbers, "git": git_revision()}


def now() -> str:
    """Return the current time in UTC, to the second: 2026-01-31T12:00:00+00:00."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def git_revision() -> str:
    """Return the commit of this code. If tracked files have changed, "+changes." and 8 hex digits of the diff's sha256
    follow. Returns "unknown" if this code is not in a git checkout of its own, or if git fails."""
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / ".git").exists():  # an installed copy may lie inside another project's checkout
        return "unknown"

    def git(*words: str) -> bytes:
        return subprocess.run(["git", "-C", checkout, *words], capture_output=True, check=True, timeout=10).stdout

    try:
        commit = git("describe", "--always", "--abbrev=40", "--dirty=+changes.").decode().strip()
        return commit + hashlib.sha256(git("diff", "HEAD")).hexdigest()[:8] * commit.endswith(".")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
