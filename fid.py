"""Score a checkpoint or a set of pictures: python fid.py checkpoint=results/my-run/latest reference=…

FID, sFID, Inception Score, precision and recall as ADM's evaluator has them, and KID. All options:
configs/fid.yaml. Read from `main` down: everything is checked before long work; the work is done in
parts that any number of processes share; start it again after it was stopped, and it goes on.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import sys
import time
from pathlib import Path

import hydra
import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

import autoencoder
import digits
import settings
from compute import device_name, use_precision
from files import explain_failure, sha256
from inception import find_weights
from job import Job, Options, find_checkpoints, plan_job
from judge import Judge, features_of, open_judge
from parts import Parts
from picture_sets import Pictures, open_pictures, save_npz
from pictures import save_grid
from processes import Processes
from reference import check_size, open_reference, save_statistics
from runlog import versions
from sample import draw_pictures, load_network, seeded_labels
from scorelog import ScoreFiles, add_line, table
from scoring import as_arrays, part_size, score, warnings

GRID = 64  # pictures of fid.png


@hydra.main(version_base="1.3", config_path="configs", config_name="fid")
def main(composed: DictConfig) -> None:
    try:
        run(settings.read(OmegaConf.to_container(composed), Options), Processes(None))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except torch.OutOfMemoryError as error:
        sys.exit(f"error: {error}\nA smaller batch_size needs less; what was done before is kept")
    except KeyboardInterrupt:
        sys.exit("stopped; start it again to go on with the parts that are missing")


def run(options: Options, processes: Processes) -> None:
    """Check everything that can be checked at once, then score one thing after the other."""
    found = find_checkpoints(options.checkpoint) if options.checkpoint else []
    samples = open_pictures(Path(options.samples)) if options.samples else None
    reference, weights = None, None
    if options.reference is not None:
        with processes.main_first():  # one process fetches the weights
            weights = find_weights(options.inception)
        reference = open_reference(Path(options.reference), options.crop)
    hashes = {"reference": reference and reference.sha256, "inception": weights and sha256(weights)}
    precision = use_precision(options.precision, processes.device)
    jobs = [plan_job(options, one, hashes, precision) for one in found]
    jobs = [job for job in jobs if not is_scored(job, options, processes)]
    decoders = {}
    for job in jobs:
        if job.latents not in decoders:
            decoders[job.latents] = autoencoder.load_decoder(job.latents, processes.device, options.autoencoder)
        if reference is not None:
            probe = torch.zeros(1, *job.latents.shape, device=processes.device)
            check_size(job.found.folder, tuple(decoders[job.latents](probe).shape[1:]), reference)
    if samples is not None:
        check_size(samples.where, (3, *samples.resolution), reference)
    judge = None
    if reference is not None and (jobs or samples or options.save_reference):
        judge = open_judge(reference, weights, Path(options.cache).expanduser(), processes)
    if options.save_reference:
        keep_statistics(Path(options.save_reference), judge, processes)
    for job in jobs:
        score_checkpoint(job, decoders[job.latents], judge, options, processes)
    if samples is not None:
        score_pictures(samples, judge, options, processes)


def files_of(job: Job, options: Options) -> ScoreFiles:
    return ScoreFiles(Path(options.out) if options.out else job.found.folder)


def is_scored(job: Job, options: Options, processes: Processes) -> bool:
    """Whether there is nothing left to do for a checkpoint; then says what was found before."""
    before = files_of(job, options).find(job.settings)
    if before is None or (options.save_samples and not before["has_samples"]):
        return False
    processes.say(f"{job.found.folder} is scored already by these settings: {before['file']}\n{table(before)}")
    return True


def keep_statistics(path: Path, judge: Judge, processes: Processes) -> None:
    """Write the reference's statistics."""
    if judge.features is None:
        raise ValueError(f"{judge.reference.where} holds no pictures to make statistics of")
    if processes.main:
        pictures = judge.reference.pictures
        with explain_failure(path):
            save_statistics(path, judge.features, pictures.count, pictures.resolution)
        processes.say(f"{path}: statistics of {pictures.count:,} pictures of {judge.reference.where}")


# ---------------------------------------------------------------------------------------- scoring


def score_checkpoint(
    job: Job, decoder: autoencoder.Decoder, judge: Judge | None, options: Options, processes: Processes
) -> None:
    """Draw, score, and write down; what is drawn is kept until the numbers are written."""
    began, files = time.perf_counter(), files_of(job, options)
    drawn = {key: value for key, value in job.settings.items() if key != "reference"}
    name = hashlib.sha256(json.dumps(drawn).encode()).hexdigest()[:12]
    size = part_size(job.count, job.sampler.batch_size)
    parts = Parts(files.folder / f".fid-{name}", drawn, job.count, size)
    with processes.lock(files.folder / ".fid.lock", f"another process is scoring in {files.folder}"):
        with processes.main_first():
            if processes.main:
                parts.begin()
        processes.say(f"{job.found.folder}: {job.count:,} samples, NFE {job.sampler.nfe}, {job.settings['dtype']}")
        draw_parts(job, decoder, judge, parts, processes)
        processes.wait()
        if processes.main:
            record = conclude(job, judge, parts, processes)
            record["seconds"]["total"] = round(time.perf_counter() - began, 1)
            write_down(job, record, parts, options)
            parts.remove()
        processes.wait()


def write_down(job: Job, record: dict, parts: Parts, options: Options) -> None:
    """fid.json, fid.png, a line in fid.csv, and samples.npz if asked for; then print the table."""
    files = files_of(job, options)
    with explain_failure(files.folder):
        files.make_room(job.settings)
        save_grid(files.path("fid.png"), parts.first("pictures", GRID), columns=8)
        if options.save_samples:
            labels = np.concatenate(list(parts.arrays("labels")))
            save_npz(files.path("samples.npz"), parts.arrays("pictures"), labels)
        where = files.write(record)
        lines = (Path(options.out) if options.out else job.found.folder.parent) / "fid.csv"
        add_line(lines, record | {"file": where})
    print(f"{table(record)}\n  written   {where}")


def draw_parts(job: Job, decoder: autoencoder.Decoder, judge: Judge | None, parts: Parts, processes: Processes) -> None:
    """Draw this process's share of the parts that are missing, with their features."""
    mine = parts.missing(processes.rank, processes.count)
    if not mine:
        return
    network, cfg = load_network(job.found, job.settings["weights"], processes.device)
    with processes.bar("samples", sum(len(parts.ranges[number]) for number in mine)) as progress:
        for number in mine:
            seeds, arrays, began = [job.seeds[i] for i in parts.ranges[number]], {}, time.perf_counter()
            labels = seeded_labels(seeds, cfg.dataset.num_classes, job.settings["labels"])
            drawn = []
            for pictures in draw_pictures(cfg.edm, network, decoder, seeds, labels, job.sampler):
                drawn.append(pictures)
                progress.update(len(pictures))
            pictures, sampled = torch.cat(drawn), time.perf_counter()
            if judge is not None:
                arrays = as_arrays(judge.network, pictures)
            seconds = {"sampling": sampled - began, "features": time.perf_counter() - sampled}
            parts.write(number, {"pictures": pictures.numpy(), "labels": labels.numpy(), **arrays}, seconds=seconds)


def conclude(job: Job, judge: Judge | None, parts: Parts, processes: Processes) -> dict:
    """Score what was drawn: the content of fid.json."""
    began, spent = time.perf_counter(), [parts.info(number)["seconds"] for number in range(len(parts.ranges))]
    if judge is not None:
        values, unavailable = score(parts, judge.reference, judge.features, processes.device)
    elif job.embedded is not None:
        pictures, labels = (np.concatenate(list(parts.arrays(name))) for name in ("pictures", "labels"))
        values, unavailable = digits.judge(pictures, labels), {"fid": "grey pictures of 8×8 are scored in raw pixels"}
    else:
        values, unavailable = {}, {"fid": "there is no reference"}
    seconds = {key: round(sum(part[key] for part in spent), 1) for key in ("sampling", "features")}
    seconds |= {
        "reference": round(judge.seconds, 1) if judge else 0.0,
        "scoring": round(time.perf_counter() - began, 1),
    }
    return {
        **scored(values, unavailable, job.count, judge, processes),
        "checkpoint": str(job.found.folder),
        "step": job.found.step,
        "ema": job.settings["weights"] == "ema",
        "seeds": [job.seeds[0], job.seeds[-1]],
        "settings": job.settings,
        "seconds": seconds,
    }


def scored(values: dict, unavailable: dict, count: int, judge: Judge | None, processes: Processes) -> dict:
    """What every fid.json has: each value with its count, and what it was made with."""
    return {
        **values,
        "count": count,
        "counts": dict.fromkeys(values, count),
        "unavailable": unavailable,
        "warnings": warnings(count, judge.reference) if judge else [],
        "reference": judge and judge.reference.where,
        "reference_count": judge and judge.reference.count,
        "reference_statistics": judge and judge.reference.statistics_from,
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv,
        "device": device_name(processes.device),
        "processes": processes.count,
        "versions": versions(),
    }


def score_pictures(samples: Pictures, judge: Judge, options: Options, processes: Processes) -> None:
    """Score pictures made elsewhere: fid.json beside them, their name before it."""
    began, path = time.perf_counter(), Path(options.samples)
    folder = Path(options.cache).expanduser() / "samples"
    features = features_of(samples, folder, judge.network, judge.weights, processes)
    extracted = time.perf_counter()
    if processes.main:
        values, unavailable = score(features, judge.reference, judge.features, processes.device)
        seconds = {
            "reference": judge.seconds,
            "features": extracted - began,
            "scoring": time.perf_counter() - extracted,
        }
        record = scored(values, unavailable, samples.count, judge, processes) | {
            "samples": str(path),
            "settings": {"samples": samples.sha256, "reference": judge.reference.sha256, "inception": judge.weights},
            "seconds": {key: round(value, 1) for key, value in seconds.items()},
        }
        files = ScoreFiles(Path(options.out)) if options.out else ScoreFiles(path.parent, f"{path.stem}.")
        with explain_failure(files.folder):
            files.folder.mkdir(parents=True, exist_ok=True)
            files.make_room(record["settings"])
            where = files.write(record)
        features.remove()
        processes.say(f"{table(record)}\n  written   {where}")
    processes.wait()


if __name__ == "__main__":
    try:
        settings.check_overrides(sys.argv[1:], settings.known_keys(Options))
    except ValueError as error:
        sys.exit(f"error: {error}")
    main()
