"""Opens MS-COCO as it is published, without unpacking its zips. Each split, such as train2014, has files of two kinds:

captions  annotations/captions_train2014.json, annotations_trainval2014.zip, or captions_train2014.json
pictures  train2014/COCO_train2014_000000000009.jpg, or train2014.zip
"""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from tread.preparing.archives import Folder, Store, Zip
from tread.preparing.photos import ONE_CLASS, Photos, cleaned
from tread.runtime.tensor_files import listed

CAPTIONS = re.compile(r"captions_((?:train|val)\d*)\.json")


def open_coco(source: Path, root: str | None) -> Photos | None:
    """Open MS-COCO's pictures with their captions, sorted by split/file name; return None if the source is not MS-COCO.

    root  a split (train2014) or a year (2014) to take; None: all splits. If train and val are taken, val is held out.

    Raises ValueError if no split matches `root`, if two years of one split match (train2014 and train2017), if a
    split has neither a folder nor a zip of pictures, or if a captions file is damaged.
    """
    files = _captions_files(source)
    if not files:
        return None
    splits = [split for split in files if root in (None, split, _year(split))]
    if not splits or len({split.removesuffix(_year(split)) for split in splits}) < len(splits):
        raise ValueError(f"{source} holds captions of {listed(sorted(files))}: choose by root=, a split or a year")
    pictures, faults = {}, []
    for split in splits:
        store, prefix = _pictures(source, split)
        captions, read = read_coco(*files[split]), store.read
        there = {name.removeprefix(prefix) for name in store.names if name.startswith(prefix)}
        there -= {name for name in there if name.startswith(".")}
        faults += [(f"{split}/{name}", "the picture is not there") for name in captions if name not in there]
        none = f"{files[split][0].name} has none"
        pictures |= {f"{split}/{name}": (captions.get(name) or none, (read, prefix + name)) for name in there}
    names, labels = sorted(pictures), np.zeros(len(pictures), dtype=np.int64)
    heldout = next((f"{split}/" for split in splits if split.startswith("val") and len(splits) == 2), None)
    photos = Photos(str(source), names, labels, ONE_CLASS, [pictures[name][1] for name in names], heldout=heldout)
    return photos.captioned([pictures[name][0] for name in names], faults)


def _year(split: str) -> str:
    return split.removeprefix("train").removeprefix("val")


def _captions_files(source: Path) -> dict[str, tuple[Path, Callable[[], bytes]]]:
    """Return the captions files, {split: arguments of read_coco}; {} if the source is not MS-COCO."""
    files = []
    for store in map(Zip, sorted(source.glob("annotations*.zip"))):
        files += [(store.path / name, partial(store.read, name)) for name in store.names]
    for folder in (source / "annotations", source):
        files += [(path, path.read_bytes) for path in sorted(folder.glob("captions_*.json"))]
    return {match[1]: (path, read) for path, read in files if (match := CAPTIONS.fullmatch(path.name))}


def _pictures(source: Path, split: str) -> tuple[Store, str]:
    """Return the folder or zip that holds a split's pictures, and the prefix of their names in it: "" or "<split>/".
    Raises ValueError if the split has neither a folder nor a zip."""
    if (source / split).is_dir():
        return Folder(source / split), ""
    if (path := source / f"{split}.zip").is_file():
        store = Zip(path)
        return store, f"{split}/" * any(name.startswith(f"{split}/") for name in store.names)
    said = f"{source} holds captions of {split}, but neither {split}/ nor {split}.zip"
    raise ValueError(f"{said}: put it there, or choose another split by root=")


def read_coco(path: Path, read: Callable[[], bytes]) -> dict[str, list[str]]:
    """Parse a captions file. `read` returns its content; `path` is its name in messages. Returns {picture's file name:
    captions, or []}, ordered by picture id. Raises ValueError if the file is unreadable, damaged or of another kind."""
    try:
        tree = json.loads(read())
        listing, notes = tree["images"], [(note["image_id"], note["caption"]) for note in tree["annotations"]]
        files = {image["id"]: image["file_name"] for image in sorted(listing, key=lambda image: image["id"])}
        if len(files) < len(listing) or len(set(files.values())) < len(files):
            raise ValueError("it lists a picture twice")
        if stray := sorted({str(image) for image, _ in notes if image not in files}):
            raise ValueError(f"it has captions of pictures that it does not list, by their ids: {listed(stray)}")
        captions: dict[str, list[str]] = {file: [] for file in files.values()}
        for image, caption in notes:
            captions[files[image]] += cleaned([caption.encode().decode()])  # ValueError for half of a surrogate pair
    except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is damaged, or no captions file of MS-COCO: {why}") from error
    return captions
