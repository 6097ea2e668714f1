"""Encodes a dataset's captions with a text encoder: python scripts/prepare_text.py dataset=… encoder=…

Text-conditional networks train on the result. Started again after a stop, with any number of processes, it makes the
missing shards. All options: configs/prepare_text.yaml; encoders: tread/encoders/language.py.
"""

if __name__ == "__main__":
    import checkout  # noqa: F401

import hydra
from omegaconf import DictConfig

from tread.preparing.encode_text import TextOptions, prepare_text
from tread.runtime import schema
from tread.runtime.cli import explained, open_door, plain, spell_folder
from tread.runtime.device import use_precision
from tread.runtime.distributed import share_work


@hydra.main(version_base="1.3", config_path="../configs", config_name="prepare_text")
def main(composed: DictConfig) -> None:
    with explained("stopped; start it again to go on with the shards that are missing"):
        options = schema.read(plain(composed), TextOptions)
        processes = share_work(options.device)
        use_precision("fp32", processes.device)
        prepare_text(options, processes)


if __name__ == "__main__":
    open_door(main, schema.known_keys(TextOptions), spell=spell_folder)
