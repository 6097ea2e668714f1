"""Encodes photos as a dataset of latents: python scripts/prepare_latents.py source=… out=…

Started again after a stop, with any number of processes, it makes the missing shards. All options:
configs/prepare_latents.yaml.
"""

if __name__ == "__main__":
    import checkout  # noqa: F401

import hydra
from omegaconf import DictConfig

from tread.preparing.encode_photos import PhotoOptions, prepare_latents
from tread.runtime import schema
from tread.runtime.cli import explained, open_door, plain
from tread.runtime.distributed import share_work


@hydra.main(version_base="1.3", config_path="../configs", config_name="prepare_latents")
def main(composed: DictConfig) -> None:
    with explained("stopped; start it again to go on with the shards that are missing"):
        options = schema.read(plain(composed), PhotoOptions)
        prepare_latents(options, share_work(options.device))


if __name__ == "__main__":
    open_door(main, schema.known_keys(PhotoOptions))
