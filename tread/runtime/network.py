"""Whether a server answers, found out soon: libraries that fetch files try for minutes where there is no network."""

from __future__ import annotations

import threading
from collections.abc import Callable

SECONDS = 4


def check_answer(url: str, ask: Callable[[str, int], int], seconds: int = SECONDS) -> None:
    """Raise OSError unless a server answers within so many seconds, name look-up included, without an error of its own.

    ask  (url, seconds) → the HTTP status, asked for by the client that is to fetch from there, with its proxies.
    """
    found: list[int | Exception] = []

    def wait() -> None:
        try:
            found.append(ask(url, seconds))
        except Exception as error:  # clients have exceptions of their own
            found.append(error)

    asking = threading.Thread(target=wait, daemon=True, name="ask")  # looking up a name knows no timeout
    asking.start()
    asking.join(seconds)
    answer = found[0] if found else f"no answer in {seconds} s"
    if not isinstance(answer, int):
        raise OSError(f"{url} can't be reached: {answer}")
    if answer >= 500:
        raise OSError(f"{url} answers with HTTP status {answer}; try again later")
