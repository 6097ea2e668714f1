"""What every door does first: look at its command line, before Hydra and any work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from settings import check_overrides


def open_door(main: Callable[[], None], known: Iterable[str]) -> None:
    """Run a door's Hydra `main`, or end with a message that names the nearest of the known keys."""
    try:
        check_overrides(sys.argv[1:], known)
    except ValueError as error:
        sys.exit(f"error: {error}")
    main()
