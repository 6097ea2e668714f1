"""What ran: versions of Python, of the packages that matter, and of this code."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path

PACKAGES = ("torch", "accelerate", "hydra-core", "diffusers", "numpy", "pillow", "scikit-learn", "safetensors")


def versions() -> dict[str, str]:
    """Versions of Python and the packages that matter, and the code's git revision."""
    numbers = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            numbers[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            numbers[package] = "not installed"
    return {**numbers, "git": git_revision()}


def git_revision() -> str:
    """The commit of this code, with "+changes" if files differ from it; "unknown" outside a checkout of its own."""
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / ".git").exists():  # an installed copy may lie inside somebody else's
        return "unknown"
    command = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=40", "--dirty=+changes"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
