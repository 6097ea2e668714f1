"""A page to try guidance by hand: python scripts/explore.py checkpoint=results/digits-tread

Two settings side by side with the same classes and seeds, what each costs, and the sample.py command that draws it.
Only this machine sees the page. All options: configs/explore.yaml.
"""

from __future__ import annotations

import os
from http.server import ThreadingHTTPServer
from pathlib import Path

if __name__ == "__main__":
    import checkout  # noqa: F401

import hydra
import torch
from omegaconf import DictConfig

from tread.reports.explorer import HOST, Explorer, ExplorerOptions, PageHandler
from tread.runtime import schema
from tread.runtime.cli import explained, open_door, plain
from tread.runtime.device import use_cores


@hydra.main(version_base="1.3", config_path="../configs", config_name="explore")
def main(composed: DictConfig) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with explained("closed"):
        options = schema.read(plain(composed), ExplorerOptions)
        use_cores(options.cpu_threads, processes=1)
        with ThreadingHTTPServer((HOST, options.port), PageHandler) as server:  # a port that is taken is refused first
            script = os.path.relpath(Path(__file__).resolve().parents[1] / "sample.py")
            server.explorer = Explorer(options, device, script)
            print(f"http://{HOST}:{options.port}  {server.explorer.title}; Ctrl-C closes it", flush=True)
            server.serve_forever()


if __name__ == "__main__":
    open_door(main, schema.known_keys(ExplorerOptions))
