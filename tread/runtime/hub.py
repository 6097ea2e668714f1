"""Names on Hugging Face's hub: what was fetched once is taken from the cache, and a silent server is found out soon,
where libraries that fetch files would try for minutes.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence

HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
SECONDS = 4  # that a server has for its answer
WEIGHT_FILES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin")


def is_cached(name: str, weights: Sequence[str]) -> bool:
    """Whether a hub id's config.json and one of its files of weights are in the cache.

    Raises ValueError if it is no hub id, OSError if they are not there and the hub is silent.
    """
    from huggingface_hub import constants, try_to_load_from_cache  # imported here because it takes long
    from huggingface_hub.utils import get_session

    if not HUB_ID.fullmatch(name) or name.endswith(WEIGHT_FILES):
        raise ValueError("there is no such file or folder")
    there = {file for file in ("config.json", *weights) if isinstance(try_to_load_from_cache(name, file), str)}
    if "config.json" in there and len(there) > 1:
        return True
    check_answer(constants.ENDPOINT, lambda url, seconds: get_session().head(url, timeout=seconds).status_code)
    return False


def check_answer(url: str, ask: Callable[[str, int], int], seconds: int = SECONDS) -> None:
    """Raise OSError unless a server answers within so many seconds, name look-up included, without an error of its own.

    ask  (url, seconds) → the HTTP status, asked for by the client that is to fetch from there, with its proxies.
    """
    answers: list[int | Exception] = []

    def wait() -> None:
        try:
            answers.append(ask(url, seconds))
        except Exception as error:  # clients have exceptions of their own
            answers.append(error)

    asking = threading.Thread(target=wait, daemon=True, name="ask")  # looking up a name knows no timeout
    asking.start()
    asking.join(seconds)
    answer = answers[0] if answers else f"no answer in {seconds} s"
    if not isinstance(answer, int):
        raise OSError(f"{url} can't be reached: {answer}")
    if answer >= 500:
        raise OSError(f"{url} answers with HTTP status {answer}; try again later")
