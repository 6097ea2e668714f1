"""Imported first by each script: finds the checkout around it, and lets Ctrl-C end further imports by a line."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tread.runtime.import_guard import guard_imports

guard_imports(vars(sys.modules["__main__"]))
