"""What settings are called elsewhere. The reference for our names are the doors' own keys."""

from __future__ import annotations

import re

import pytest
from test_pages import DOORS

from tread.runtime import foreign_names
from tread.runtime.schema import check_overrides

TRAIN, SAMPLE = DOORS["train.py"][1], DOORS["sample.py"][1]


@pytest.mark.parametrize(
    ("door", "given", "ours"),
    [
        ("train.py", "optim.learning_rate", "optim.lr"),
        ("train.py", "learning-rate", "optim.lr"),
        ("train.py", "lr", "optim.lr"),
        ("train.py", "optimizer.lr", "optim.lr"),
        ("train.py", "epochs", "train.steps"),
        ("train.py", "trainer.max_epochs", "train.steps"),
        ("train.py", "max_steps", "train.steps"),
        ("train.py", "bs", "train.batch_size"),
        ("train.py", "batch_size", "train.batch_size"),
        ("train.py", "eval.bs", "eval.batch_size"),
        ("train.py", "evaluation.batch_size", "eval.batch_size"),
        ("train.py", "global_batch_size", "train.batch_size"),
        ("train.py", "gradient_accumulation_steps", "train.micro_batch_size"),
        ("train.py", "mixed_precision", "train.precision"),
        ("train.py", "precision", "train.precision"),
        ("train.py", "max_grad_norm", "optim.clip_norm"),
        ("train.py", "weight_decay", "optim.weight_decay"),
        ("train.py", "ema_decay", "ema.decay"),
        ("train.py", "log_every", "every.log"),
        ("train.py", "ckpt_every", "every.save"),
        ("train.py", "eval_every", "every.evaluate"),
        ("train.py", "resume_from", "resume"),
        ("train.py", "ckpt", "init_from"),
        ("train.py", "data_path", "dataset.path"),
        ("train.py", "output_dir", "results"),
        ("train.py", "image_size", "dataset.size"),
        ("train.py", "num_classes", "dataset.num_classes"),
        ("train.py", "global_seed", "seed"),
        ("train.py", "num_gpus", "train.processes"),
        ("train.py", "vae", "sampling.autoencoder"),
        ("train.py", "compile", "train.compile"),
        ("train.py", "report_to", "tracker"),
        ("train.py", "hidden_dim", "model.hidden_size"),
        ("train.py", "num_fid_samples", "eval.fid_samples"),
        ("train.py", "num_sampling_steps", "sampling.steps"),
        ("sample.py", "ckpt", "checkpoint"),
        ("sample.py", "seed", "seeds"),
        ("sample.py", "n_samples", "seeds"),
        ("sample.py", "cfg_scale", "guidance.scale"),
        ("sample.py", "guidance_scale", "guidance.scale"),
        ("sample.py", "num_inference_steps", "steps"),
        ("sample.py", "outdir", "out"),
        ("sample.py", "bs", "batch_size"),
        ("fid.py", "num_fid_samples", "num_samples"),
        ("fid.py", "seed", "first_seed"),
        ("fid.py", "ref_batch", "reference"),
        ("scripts/prepare_latents.py", "image_size", "resolution"),
        ("scripts/prepare_latents.py", "num_workers", "workers"),
        ("scripts/prepare_latents.py", "data_dir", "source"),
        ("scripts/prepare_latents.py", "vae", "autoencoder"),
        ("scripts/import_checkpoint.py", "ckpt", "weights"),
        ("scripts/reconstruct_ema.py", "ckpt", "run"),
    ],
)
def test_a_foreign_name_is_refused_and_ours_is_told(door, given, ours):
    with pytest.raises(ValueError, match=rf"^unknown setting '{given}'; .* '{re.escape(ours)}'"):
        check_overrides([f"{given}=3"], DOORS[door][1])


def test_what_is_counted_otherwise_or_is_not_there_is_said():
    with pytest.raises(ValueError, match="'train.steps': optimizer steps, not epochs"):
        check_overrides(["epochs=3"], TRAIN)
    with pytest.raises(ValueError, match="'num_workers'; there is nothing to set"):
        check_overrides(["num_workers=3"], TRAIN)


@pytest.mark.parametrize("door", DOORS)
def test_a_doors_own_keys_are_never_foreign(door):
    known = DOORS[door][1]
    assert check_overrides([f"{key}=1" for key in known], known) is None


def test_every_name_of_ours_in_the_table_is_a_key_of_some_door():
    keys = {key for _, known, _ in DOORS.values() for key in known}
    named = re.findall(r"^([^\s:]+(?: [^\s:]+)*)", foreign_names._TABLE, re.M)
    assert len(named) > 50
    for key in " ".join(named).split():
        assert key in keys or key == "-", key


def test_a_misspelt_name_still_names_the_nearest():
    with pytest.raises(ValueError, match="nearest known one is 'guidance.interval'"):
        check_overrides(["guidance.intervall=3"], SAMPLE)
