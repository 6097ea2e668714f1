"""What a script imports first: then the checkout it lies in is found, and Ctrl-C ends further imports by a line."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tread.runtime.import_guard import guard_imports

guard_imports(vars(sys.modules["__main__"]))
