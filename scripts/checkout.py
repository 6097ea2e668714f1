"""Puts the repository on sys.path; Ctrl-C during imports prints a line, not a traceback. Scripts import this first."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tread.runtime.import_guard import guard_imports

guard_imports(vars(sys.modules["__main__"]))
