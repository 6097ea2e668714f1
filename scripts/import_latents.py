"""Imports other people's latents as a dataset: python scripts/import_latents.py kind=… source=… out=…

Started again, it makes only missing shards. Options: configs/import_latents.yaml; sources: tread/preparing/imports.py.
"""

if __name__ == "__main__":
    import checkout  # noqa: F401

from collections.abc import Callable
from pathlib import Path

import numpy as np

from tread.data.dataset import LatentDataset
from tread.data.store import pieces_of, spread_indices
from tread.data.writer import DatasetWriter
from tread.drawing.grids import save_grid
from tread.preparing import encode_photos
from tread.preparing.imports import STATISTICS, ForeignSamples, ImportOptions, open_foreign, write_text
from tread.runtime.cli import door, open_door
from tread.runtime.distributed import Processes, share_work
from tread.runtime.files import content_hash, size_text


@door(ImportOptions, "stopped; start it again to go on with the shards that are missing")
def main(options: ImportOptions) -> None:
    import_all(options, share_work("cpu"))


def import_all(options: ImportOptions, processes: Processes) -> None:
    """Open the source, write the missing shards, assemble the dataset. ValueError or OSError if any of it fails."""
    latents, samples = open_foreign(options)
    labels, text, by = samples.labels, samples.text, samples.statistics
    plan = {"kind": options.kind, "source": str(Path(options.source).resolve()), "shard_size": options.shard_size}
    plan["labels_sha256"] = content_hash(labels.tobytes())
    factors, normalize = {"mean": latents.scale, "std": abs(latents.scale)}, {}
    if by is not None:
        normalize["normalize_by"] = {key: [factor * value for value in by[key]] for key, factor in factors.items()}
    if text is not None:
        plan["captions"] = content_hash(text.counts.tobytes())
        plan["captions_of"] = options.captions and str(Path(options.captions).resolve())
    ranges = pieces_of(range(len(labels)), options.shard_size)
    writer = DatasetWriter(Path(options.out), latents, plan | normalize, ranges=ranges)
    if writer.is_finished():
        print(f"{options.out} is finished; remove it to make it anew, if its source changed since")
        return
    writer.begin()
    missing = writer.missing()
    text_bytes = int(text.counts.sum()) * text.spec.caption_bytes if text else 0
    writer.check_space(writer.rows(missing), text_bytes if missing else 0)
    views = "with flipped copies" if latents.views == 2 else "one view"
    print(f"  source    {options.kind}, {len(labels):,} samples, {views}, {options.source}")
    print(f"  holds     {encode_photos.stored_meaning(latents)}")
    if text is None:
        guessed = options.num_classes is None and options.classes is None
        print(f"  classes   {len(latents.classes)}{', from the largest label' * guessed}")
    else:
        known = "with the captions as words" if text.captions else "the captions as words unknown"
        print(f"  text      {text.spec.describe()}, {text.counts.sum():,} captions, {known}")
        print(f"  stores    {size_text(text_bytes)} of text")
    if samples.normalize:
        print(f"  normal    dataset.normalize=true takes {STATISTICS if by else f'measured ones: no {STATISTICS}'}")

    def make(numbers: list[int], done: Callable[[int], object]) -> None:
        for number in numbers:
            stored = []
            for index in ranges[number]:
                stored.append(samples.read(index))
                if (shape := stored[-1].shape) != (first := latents.stored_shape):
                    raise ValueError(f"{samples.name(index)} has shape {shape}, but the first sample has {first}")
                done(1)
            writer.write(number, np.stack(stored), labels[ranges[number]])

    writer.share(processes, "latents", make, "sample")
    if missing or not (writer.data / "index.json").exists():  # else the index stays: it may list text
        writer.assemble(**normalize)
    if text is not None:
        write_text(writer.data, text, processes)
    finish(writer, options, samples)


def finish(writer: DatasetWriter, options: ImportOptions, samples: ForeignSamples) -> None:
    """Save a picture of options.decode samples, move the dataset to options.out, print warnings and how to train."""
    data = LatentDataset(writer.data)
    made = encode_photos.dataset_numbers(data)
    pictures = f"  pictures  {writer.folder / 'report.png'}: decoded samples; look whether they are whole"
    if options.decode:
        chosen = spread_indices(len(data), options.decode)
        try:
            after = encode_photos.decode_samples(data, chosen, "cpu")
            save_grid(data.folder / "report.png", after, columns=4)
        except (ValueError, RuntimeError) as error:
            pictures = f"  pictures  none, so nobody has seen whether the scale is right: {error}"
    writer.publish(made)
    print(encode_photos.report_text(made))
    more = " dataset.normalize=true" * samples.normalize
    if samples.text is not None:
        more += f" text.encoder={samples.text.spec.encoder}"
    if samples.statistics is not None:
        (mean, std), (taken, by) = np.array(data.statistics), np.array(data.normal)
        far = np.abs([(mean - taken) / by, std / by - 1]).max()  # in standard deviations of the statistics
        if far > 0.2:
            off = f"{STATISTICS} is off by {far:.2f} standard deviations from these latents"
            print(f"warning: {off}: right only to go on with a network of other data")
    elif not samples.normalize and not 0.2 < np.mean(made["channel_std"]) < 2.5:
        unusual = f"network latents of standard deviation {np.mean(made['channel_std']):.2f} are unusual"
        print(f"warning: {unusual} (Stable Diffusion's have 0.6 to 1.1): are scale and scale_applied right?")
    if options.decode:
        print(pictures)
    print(f"  dataset   {writer.folder}: train with dataset=folder dataset.path={writer.folder}{more}")


if __name__ == "__main__":
    open_door(main)
