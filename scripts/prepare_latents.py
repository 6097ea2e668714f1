"""Encodes photos as a dataset of latents: python scripts/prepare_latents.py source=… out=…

Started again, with any number of processes, it makes only missing shards. Options: configs/prepare_latents.yaml.
"""

if __name__ == "__main__":
    import checkout  # noqa: F401

from tread.preparing.encode_photos import PhotoOptions, prepare_latents
from tread.runtime.cli import door, open_door
from tread.runtime.distributed import share_work


@door(PhotoOptions, "stopped; start it again to go on with the shards that are missing")
def main(options: PhotoOptions) -> None:
    prepare_latents(options, share_work(options.device))


if __name__ == "__main__":
    open_door(main)
