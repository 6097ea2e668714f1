"""A server that does not answer is found out soon: against sockets that refuse, keep silent, or answer."""

import socket
import time
from urllib.request import urlopen

import huggingface_hub
import pytest
from conftest import raising
from huggingface_hub import errors

from tread.encoders import inception
from tread.runtime import hub
from tread.runtime.hub import check_answer


@pytest.fixture
def silent():
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_server_that_keeps_silent_is_waited_for_shortly(silent):
    began = time.perf_counter()
    with pytest.raises(OSError, match=f"{silent} can't be reached: no answer in 0.2 s"):
        check_answer(silent, lambda url, seconds: urlopen(url, timeout=60).status, seconds=0.2)
    assert time.perf_counter() - began < 2


def test_what_a_client_raises_is_told():
    with pytest.raises(OSError, match="https://x can't be reached: no such name"):
        check_answer("https://x", raising(RuntimeError("no such name")))
    check_answer("https://x", lambda url, seconds: 404)  # the fetching itself says what is missing


def test_inception_weights_without_a_network_end_soon(silent, monkeypatch, tmp_path):
    monkeypatch.delenv(inception.VARIABLE, raising=False)
    monkeypatch.setattr("torch.hub.get_dir", lambda: tmp_path)
    monkeypatch.setattr(inception, "URL", f"{silent}/weights.pth")
    monkeypatch.setattr("tread.runtime.hub.check_answer.__defaults__", (0.2,))
    began = time.perf_counter()
    with pytest.raises(FileNotFoundError, match="(?s)could not be fetched.*can't be reached.*inception=…"):
        inception.find_weights()
    assert time.perf_counter() - began < 2


def test_a_connection_that_is_lost_is_an_error_of_the_system(monkeypatch, tmp_path):
    lost = errors.HTTPError("lost")

    def fetch(local_files_only=False, **more):
        raise errors.LocalEntryNotFoundError("none") if local_files_only else lost

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", raising(lost))
    monkeypatch.setattr(hub, "check_hub", lambda: None)
    with pytest.raises(OSError, match="hf:ann/a is not in the cache, and lost"):
        hub.local("hf:ann/a")
    with pytest.raises(OSError, match="was written, but not uploaded to ann/a: lost"):
        hub.push(tmp_path, "ann/a")
