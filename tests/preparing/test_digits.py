"""The embedded dataset and its judge, against the scans themselves."""

import numpy as np
import pytest
from conftest import ROOT
from forked import run_python

from tread.data.dataset import LatentDataset
from tread.data.latents import to_network
from tread.encoders.autoencoder import load_decoder
from tread.evaluation.metric_table import with_real
from tread.evaluation.scorers import DigitsJudge, judge_digits
from tread.preparing import digits


def test_the_dataset_is_the_scans_exactly(tmp_path):
    for part, (pixels, labels) in digits.digits_parts().items():
        digits.prepare_digits(tmp_path / part, part)
        data = LatentDataset(tmp_path / part, verify="full")
        batch = data.read(np.arange(len(data)))
        z = to_network(batch.stored, data.latents)
        assert np.array_equal((z.numpy() + 1) * 8, pixels.reshape(-1, 1, 8, 8))
        assert np.array_equal(batch.labels.numpy(), labels)
        decoded = load_decoder(data.latents)(z).numpy()
        assert np.array_equal(np.round(decoded / 255 * 16), pixels.reshape(-1, 1, 8, 8))
    assert sum(len(labels) for _, labels in digits.digits_parts().values()) == 1797


@pytest.mark.slow
def test_several_processes_may_prepare_it_at_once(tmp_path):
    call = f"digits.prepare_digits(pathlib.Path({str(tmp_path / 'data' / 'train')!r}), 'train')"
    code = f"import pathlib; from tread.preparing import digits; {call}"
    assert run_python("-c", code, cwd=ROOT, processes=3).returncode == 0
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["train"]
    assert len(LatentDataset(tmp_path / "data/train", verify="full")) == 1442


def test_train_and_heldout_do_not_overlap():
    (train, _), (heldout, labels) = digits.digits_parts().values()
    assert not {tuple(p) for p in train} & {tuple(p) for p in heldout}
    assert np.bincount(labels).min() >= 34


def test_the_judge_knows_real_digits_from_wrong_labels_and_noise():
    (train, train_labels), (heldout, labels) = digits.digits_parts().values()
    pictures = np.round(heldout.reshape(-1, 1, 8, 8) / 16 * 255).astype(np.uint8)
    real = judge_digits(pictures, labels)
    assert real["label_agreement"] == real["label_agreement_real"] == pytest.approx(0.989, abs=0.003)
    assert real["frechet_pixels"] == pytest.approx(0, abs=1e-6) and 5 < real["frechet_pixels_real"] < 50
    assert judge_digits(pictures, (labels + 1) % 10)["label_agreement"] < 0.02
    noise = np.random.default_rng(0).integers(0, 256, pictures.shape).astype(np.uint8)
    judged = judge_digits(noise, labels)
    assert judged["label_agreement"] < 0.25 and judged["frechet_pixels"] > 20 * judged["frechet_pixels_real"]
    assert [*judged] == with_real(DigitsJudge.metrics)
