"""Downloads from and uploads to the Hugging Face hub; gives up after seconds, not minutes, without an answer."""

import contextlib
import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
PREFIX = "hf:"  # of names of checkpoints on the hub: hf:user/name or hf:user/name@revision
SECONDS = 4  # to wait for a server's answer
FETCHED = ["*.safetensors", "*.json", "*.yaml", "*.md"]
WEIGHT_FILES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin")


def check_id(name: str) -> None:
    """Raise ValueError unless `name` is a folder or has the form of a hub model's id, "name" or "user/name"."""
    if not Path(name).is_dir() and (not HUB_ID.fullmatch(name) or name.endswith(WEIGHT_FILES)):
        raise ValueError("there is no such file or folder")


def is_cached(name: str, weights: Sequence[str]) -> bool:
    """Return whether the cache holds the hub's model `name`: its config.json and at least one of the files `weights`.
    Raises ValueError if `name` is not a hub id, and OSError if they are not cached and the hub does not answer."""
    from huggingface_hub import try_to_load_from_cache  # imported here because it takes long

    check_id(name)
    cached = [isinstance(try_to_load_from_cache(name, file), str) for file in ("config.json", *weights)]
    if cached[0] and any(cached[1:]):
        return True
    check_hub()
    return False


def local(source: str | Path) -> Path:
    """Return the path that `source` names, with ~ expanded; hf:user/name[@revision] is first fetched from the hub.

    Only safetensors, JSON, YAML and Markdown files are fetched, never a pickle. They go into huggingface_hub's cache,
    in a folder named by the revision's hash. If the hub does not answer, the cached copy is used.

    Raises ValueError for a malformed name, for a repository or revision that does not exist, can't be accessed or has
    no safetensors; OSError if the hub does not answer and nothing is cached.
    """
    if not str(source).startswith(PREFIX):
        return Path(source).expanduser()
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    name, at, revision = str(source).removeprefix(PREFIX).partition("@")
    if not HUB_ID.fullmatch(name) or "/" not in name or (at and not revision) or "@" in revision:
        raise ValueError(f"{source} is no name on the hub, such as hf:user/name or hf:user/name@revision")
    if not sys.stderr.isatty():
        disable_progress_bars()
    fetch = {"repo_id": name, "revision": revision or None, "allow_patterns": FETCHED}
    try:
        check_hub()
        folder = Path(snapshot_download(**fetch))
    except errors.RepositoryNotFoundError as error:  # its own text asks for a login even if the name does not exist
        raise ValueError(f"{source}: there is no {name} on the hub, or this login can't read it") from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f"{source}: {name} has no revision {revision or 'main'}") from error
    except errors.HfHubHTTPError as error:
        raise ValueError(f"{source}: {' '.join(str(error).split())}") from error
    except (OSError, errors.HTTPError) as error:  # of huggingface_hub 1, lost connections are no OSErrors
        with contextlib.suppress(errors.LocalEntryNotFoundError):
            folder = Path(snapshot_download(**fetch, local_files_only=True))
            if any(folder.rglob("*.safetensors")):
                return folder
        raise OSError(f"{source} is not in the cache, and {error}") from error
    if not any(folder.rglob("*.safetensors")):
        raise ValueError(f"{source} holds no .safetensors; pickles (.pt, .bin, .ckpt) are not taken from the hub")
    return folder


def revision_in(path: object) -> str | None:
    """Return the commit hash in a path of the hub's cache, or in a text with such a path; None if there is none."""
    found = re.search(r"snapshots/([0-9a-f]{40})\b", str(path))
    return found and found[1]


def check_repository(name: str) -> None:
    """Raise ValueError if `name` is not "user/name" or no hub login is found, OSError if the hub does not answer."""
    from huggingface_hub import get_token

    if not HUB_ID.fullmatch(name) or "/" not in name:
        raise ValueError(f"push={name} is not the name of a hub repository, such as push=user/name")
    if get_token() is None:
        raise ValueError(f"push={name} needs a login: run `hf auth login`, or set HF_TOKEN")
    check_hub()


def push(folder: Path, name: str) -> str:
    """Upload a folder to the hub's repository `name`, made if missing; return the upload's URL. OSError if refused."""
    from huggingface_hub import HfApi, errors

    hub = HfApi()
    try:
        hub.create_repo(name, exist_ok=True)
        return str(hub.upload_folder(repo_id=name, folder_path=folder))
    except (OSError, errors.HTTPError) as error:
        raise OSError(f"{folder} was written, but not uploaded to {name}: {' '.join(str(error).split())}") from error


def check_hub() -> None:
    """Raise OSError unless the hub answers within seconds."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    check_answer(constants.ENDPOINT, lambda url, seconds: get_session().head(url, timeout=seconds))


def check_answer(url: str, ask: Callable[[str, int], object], seconds: int = SECONDS) -> None:
    """Raise OSError unless the server at `url` answers within `seconds`, including the DNS look-up. `ask(url, seconds)`
    sends a request with the HTTP client that will download the file, and raises an error if there is no answer."""
    failure: list[object] = [f"no answer in {seconds} s"]  # emptied by an answer

    def wait() -> None:
        try:
            ask(url, seconds)
            failure.clear()
        except Exception as error:  # clients have exceptions of their own
            failure[0] = error

    asking = threading.Thread(target=wait, daemon=True)  # a DNS look-up has no timeout
    asking.start()
    asking.join(seconds)
    if failure:
        raise OSError(f"{url} can't be reached: {failure[0]}")
