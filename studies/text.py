"""The figure of studies/text.yaml, drawn as guidance.py does: retrieval against the scale ω, and FLOPs a sample."""

from __future__ import annotations

from collections.abc import Mapping

from studies import guidance
from studies.results import Made, shown
from studies.study import Study

draw = guidance.draw


def columns(study: Study, results: Mapping[str, list[Made]]) -> dict[str, dict[str, str]]:
    """For the table: FLOPs a sample, and how many times faster than its pair's an arm's training steps were."""
    faster: dict[str, list[float]] = {}
    for arm, other in study.against.items():
        paces = {run["seed"]: pace for run in results[other] if (pace := _pace(run))}
        found = [paces[run["seed"]] / pace for run in results[arm] if run["seed"] in paces and (pace := _pace(run))]
        if found:
            faster[arm] = found
    said = {arm: shown(ratios) for arm, ratios in faster.items()}
    return guidance.columns(study, results) | ({"its pair's step time over its own": said} if said else {})


def _pace(run: Made) -> float | None:
    """Seconds of training an image, of all of it; None where nobody knows."""
    timed = [point["seconds"] / point["images"] for point in run["points"] if point.get("seconds") and point["images"]]
    return timed[-1] if timed else None
