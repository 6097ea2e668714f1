"""What the embedded datasets' own judges say of a run's samples."""

from __future__ import annotations

import torch

from tread.evaluation.digits_judge import judge_digits
from tread.evaluation.emoji_judge import ask, judge_emoji, real_emoji
from tread.evaluation.inception import at_hand, find_weights, load_inception
from tread.training.periodic import draw_samples
from tread.training.run import Run


def judge_demo(run: Run) -> dict[str, float]:
    """Values of eval.demo_samples EMA samples, by name; none of classes of emoji, which has but one.

    Raises ValueError or OSError for weights of Inception that are named and can't be read.
    """
    count, cfg = run.cfg.eval.demo_samples, run.cfg
    if cfg.dataset.embedded == "digits":
        labels = torch.arange(count) % cfg.dataset.num_classes
        return judge_digits(draw_samples(run, labels).numpy(), labels.numpy())
    if not cfg.model.takes_text:
        return {}
    asked = ask(run.data, run.heldout, count)
    pictures = draw_samples(run, torch.arange(count), asked.texts)
    weights = find_weights(cfg.eval.inception) if at_hand(cfg.eval.inception) else None
    inception = weights and load_inception(weights, run.processes.device)
    return judge_emoji(pictures, asked, real_emoji(run.data, run.heldout), inception)
