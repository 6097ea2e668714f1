"""Writes an encoder's features of a dataset: python scripts/prepare_features.py dataset=… encoder=…

Training reads features of patches for REPA (alignment.source=stored), of whole pictures for REG (model.class_token).
Restarted after a stop, with any number of processes, it makes only the missing shards. All options:
configs/prepare_features.yaml; encoders: tread/encoders/vision.py.
"""

if __name__ == "__main__":
    import checkout  # noqa: F401

from tread.preparing.encode_features import FeatureOptions, prepare_features
from tread.runtime.cli import door, open_door, spell_folder
from tread.runtime.device import use_precision
from tread.runtime.distributed import share_work


@door(FeatureOptions, "stopped; start it again to go on with the shards that are missing")
def main(options: FeatureOptions) -> None:
    processes = share_work(options.device)
    use_precision("fp32", processes.device)
    prepare_features(options, processes)


if __name__ == "__main__":
    open_door(main, spell=spell_folder)
