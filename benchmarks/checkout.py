"""Puts the repository on sys.path, and lets Ctrl-C during imports print one line. Each benchmark imports this first."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tread.runtime.import_guard import guard_imports

guard_imports(vars(sys.modules["__main__"]))
