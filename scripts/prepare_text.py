"""Encodes a dataset's captions with a text encoder: python scripts/prepare_text.py dataset=… encoder=…

Text-conditional networks train on the result. Restarted after a stop, with any number of processes, the script makes
only the missing shards. All options: configs/prepare_text.yaml; encoders: tread/encoders/language.py.
"""

if __name__ == "__main__":
    import checkout  # noqa: F401

from tread.preparing.encode_text import TextOptions, prepare_text
from tread.runtime.cli import door, open_door, spell_folder
from tread.runtime.device import use_precision
from tread.runtime.distributed import share_work


@door(TextOptions, "stopped; start it again to go on with the shards that are missing")
def main(options: TextOptions) -> None:
    processes = share_work(options.device)
    use_precision("fp32", processes.device)
    prepare_text(options, processes)


if __name__ == "__main__":
    open_door(main, spell=spell_folder)
