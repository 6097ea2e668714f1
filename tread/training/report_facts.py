"""What a report says of a single run beside its curves: its facts, its troubles, and where its time went."""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Sequence
from pathlib import Path

from tread.evaluation.heldout_loss import CALLED
from tread.runtime.schema import written
from tread.training.comparison_text import unit
from tread.training.reading import Found, told_time
from tread.training.run_folder import LAUNCH, differences, value_at

ABSENT = "–"
SPENT = {  # keys of metrics.jsonl → what took those seconds, beside the training steps
    "eval_seconds": "evaluation loss",
    "fid_seconds": "FID in training",
    "draw_seconds": "drawing samples",
    "judge_seconds": "judging samples at the end",
    "save_seconds": "saving checkpoints",
}


def facts_of(run: Found) -> dict[str, str]:
    """What ran, on what, at which cost; by what it is called."""
    config, last, first = run.config, run.starts[-1] if run.starts else {}, run.starts[0] if run.starts else {}
    versions = last.get("versions", {})
    batch, planned = value_at(config, "train.batch_size"), value_at(config, "train.steps")
    spent = {key: _last(run, key) for key in ("seconds", "flops")}
    facts = {
        "state": run.state(),
        "folder": str(run.folder),
        "network": _network(config),
        "data": value_at(config, "dataset.name"),
        "objective": config.get("objective"),
        "seed": config.get("seed"),
        "first weights": first.get("weights"),
        "steps": f"{run.step:,}" + (f" of {planned:,}" if isinstance(planned, int) else ""),
        "images": f"{run.step * batch:,} in batches of {batch:,}" if isinstance(batch, int) else None,
        "training FLOPs": spent["flops"] and f"{spent['flops']:.4g}",
        "training time": spent["seconds"] and duration(spent["seconds"]),
        "device": _device(last),
        "commit": _short(versions.get("git")),
        "versions": ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "numpy") if name in versions),
        "started": told_time(first.get("time")),
        "last heard of": told_time(run.status.get("time")),
        "from start to end": _wall(run),
        "command": _command(last.get("command")),
    }
    return {name: ABSENT if value in (None, "") else str(value) for name, value in facts.items()}


def _last(run: Found, key: str) -> float | None:
    return next((record[key] for record in reversed(run.records) if key in record), None)


def _network(config: dict) -> str | None:
    model = config.get("model")
    if not model:
        return None
    sizes = [f"{key.replace('_', ' ')} {model[key]}" for key in ("hidden_size", "depth", "patch_size") if key in model]
    routes = [
        f"r({route.get('start')}→{route.get('end')}) at ratio {route.get('selection_ratio')}"
        + ("" if route.get("rejoin") in (None, route.get("start")) else f" rejoining as before block {route['rejoin']}")
        for route in model.get("routes") or ()
    ]
    return ", ".join([str(model["name"]), *sizes, "; ".join(routes) or "no route"])


def _device(start: dict) -> str:
    count = start.get("processes")
    processes = f"{count} processes on " if isinstance(count, int) and count > 1 else ""
    return processes + ", ".join(str(start[key]) for key in ("device", "precision") if start.get(key))


def _wall(run: Found) -> str | None:
    """From the start to the end, of a run that was started once and says when it ended."""
    if run.status.get("state") == "running":
        return None
    try:
        (start,) = run.starts
        began, ended = (datetime.datetime.fromisoformat(one["time"]) for one in (start, run.status))
        return duration((ended - began).total_seconds())
    except (ValueError, KeyError, TypeError):
        return None


def _short(commit: object) -> str | None:
    """Twelve digits of a revision, which git knows it by, and whether there were changes beside it."""
    hashed, plus, rest = str(commit or "").partition("+")
    return hashed[:12] + plus + rest


def _command(words: object) -> str | None:
    return shlex.join(map(str, ["python", *words])) if isinstance(words, list) and words else None


def duration(seconds: float) -> str:
    name, size = unit("seconds", seconds)
    return f"{seconds / size:.3g} {name}"


def troubles_of(run: Found) -> list[str]:
    """What somebody who reads this run's numbers should know, the worst first."""
    found = []
    state, planned = run.state(), value_at(run.config, "train.steps")
    early = isinstance(planned, int) and run.step < planned
    if run.status.get("state") != "finished" or early:
        found.append(f"{state}, at step {run.step:,}" + (f" of {planned:,}" if isinstance(planned, int) else ""))
    found += run.problems
    if bad := [record for record in run.records if record.get("bad_steps")]:
        count = sum(record["bad_steps"] for record in bad)
        found.append(
            f"{count:,.0f} steps were skipped, since loss or gradient was not finite: between steps "
            f"{_before(run, bad[0]):,} and {bad[-1]['step']:,}"
        )
    for name, called in CALLED.items():
        if absurd := [record for record in run.records if record.get(name, 0) > 1000]:
            found.append(f"the {called} is {absurd[0][name]:.3g} at step {absurd[0]['step']:,}")
    if run.config and not value_at(run.config, "dataset.heldout"):
        found.append("there is no held-out data, so no evaluation")
    found += [str(text) for start in run.starts for text in start["warnings"]]
    return list(dict.fromkeys(found + _resumptions(run)))


def _before(run: Found, record: dict) -> int:
    """The step of the last log before one."""
    return max((r["step"] for r in run.records if "bad_steps" in r and r["step"] < record["step"]), default=0)


def _resumptions(run: Found) -> list[str]:
    """That a run was started again, what was changed, and that its code was another or not committed."""
    found = []
    if len(run.starts) > 1:
        steps = ", ".join(f"{start['step']:,}" for start in run.starts[1:])
        times = "once" if len(run.starts) == 2 else f"{len(run.starts) - 1} times"
        found.append(f"started again {times}, at step {steps}")
    for before, now in zip(run.starts, run.starts[1:]):
        for key, (old, new) in differences(before["config"], now["config"]).items():
            if key not in LAUNCH:
                found.append(f"{key} was {written(old)}, is {written(new)} from step {now['step']:,} on")
    commits = list(dict.fromkeys(str(start["versions"].get("git")) for start in run.starts))
    if len(commits) > 1:
        found.append(f"its code changed between starts: commits {', '.join(commits)}")
    elif commits and commits[0].endswith("+changes"):
        found.append("its code differed from the commit that is stated: there were changes that were not committed")
    return found


def time_of(run: Found) -> dict[str, float]:
    """What took the run's seconds, in the order of a run; of older code, what is known."""
    total, first = _last(run, "seconds") or 0.0, sum(r.get("first_step_seconds", 0.0) for r in run.records)
    start = sum(
        r["cold_start_seconds"] - r.get("first_step_seconds", 0.0) for r in run.records if "cold_start_seconds" in r
    )
    waited, since = 0.0, 0.0
    for record in run.records:
        if "data_wait" in record and "seconds" in record:
            waited += record["data_wait"] * max(0.0, record["seconds"] - since)
            since = record["seconds"]
    rest = run.status.get("spent") if isinstance(run.status.get("spent"), dict) else {}
    numbers = [*run.records, {key: value for key, value in rest.items() if isinstance(value, (int, float))}]
    beside = {called: sum(record.get(key, 0.0) for record in numbers) for key, called in SPENT.items()}
    found = {
        "start, before the first step": start,
        "the first step of each start": first,
        "other training steps" if first else "training steps": max(0.0, total - first - waited),
        "waiting for data": waited,
        **beside,
    }
    return {name: seconds for name, seconds in found.items() if seconds > 0}


def settings_apart(runs: Sequence[Found]) -> dict[str, list[str]]:
    """Dotted keys that differ between runs → the value of each; those of a launch left out."""
    configs = [run.config for run in runs]
    keys = {key: None for config in configs for key in differences(configs[0], config) if key not in LAUNCH}
    return {
        key: ["–" if value_at(config, key) is None else written(value_at(config, key)) for config in configs]
        for key in keys
    }


def place_of(path: object, run: Path) -> str:
    """A path as it is shown: below a run's folder without it."""
    text = str(path)
    return text.removeprefix(f"{run}/").removeprefix(f"{run.resolve()}/")
