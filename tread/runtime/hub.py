"""Checks before fetching from the Hugging Face hub: is a model cached, and does the server answer within seconds?
Without them, the libraries would retry a silent server for minutes."""

import re
import threading
from collections.abc import Callable, Sequence

HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
SECONDS = 4  # to wait for a server's answer
WEIGHT_FILES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin")


def is_cached(name: str, weights: Sequence[str]) -> bool:
    """Return whether the cache holds the hub's model `name`: its config.json and at least one of the files `weights`.
    Raises ValueError if `name` is no hub id, OSError if the model is not cached and the hub does not answer."""
    from huggingface_hub import constants, try_to_load_from_cache  # imported here because it takes long
    from huggingface_hub.utils import get_session

    if not HUB_ID.fullmatch(name) or name.endswith(WEIGHT_FILES):
        raise ValueError("there is no such file or folder")
    cached = [isinstance(try_to_load_from_cache(name, file), str) for file in ("config.json", *weights)]
    if cached[0] and any(cached[1:]):
        return True
    check_answer(constants.ENDPOINT, lambda url, seconds: get_session().head(url, timeout=seconds))
    return False


def check_answer(url: str, ask: Callable[[str, int], object], seconds: int = SECONDS) -> None:
    """Raise OSError unless a server answers within `seconds`, including the DNS look-up. `ask(url, seconds)` sends a
    request, and raises an error if there is no answer; it should use the client and the proxies of the later fetch.
    """
    failure: list[object] = [f"no answer in {seconds} s"]

    def wait() -> None:
        try:
            ask(url, seconds)
            failure.clear()
        except Exception as error:  # clients have exceptions of their own
            failure[0] = error

    asking = threading.Thread(target=wait, daemon=True)  # the look-up of a name has no timeout
    asking.start()
    asking.join(seconds)
    if failure:
        raise OSError(f"{url} can't be reached: {failure[0]}")
