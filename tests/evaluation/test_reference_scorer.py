"""The whole suite of metrics, against the functions of metrics.py on the same features."""

import itertools
import os

import numpy as np
import pytest
import torch
from conftest import open_pictures, open_reference

from tread.data.store import ShardStore, pieces_of
from tread.encoders.inception import Inception, extract, load_inception
from tread.evaluation import image_sets, metrics
from tread.evaluation.metric_table import METRICS, feature_metrics
from tread.evaluation.metrics import Moments
from tread.evaluation.scorers import ReferenceScorer
from tread.runtime.distributed import share_work

NAMES = tuple(feature_metrics())
NARROW = 16  # times fewer features than the Inception has, 2048 / 16 = 128 of them, where a file states their moments


def parts_of(folder, arrays, size=7):
    count = len(next(iter(arrays.values())))
    parts = ShardStore(folder, {}, pieces_of(range(count), size))
    parts.begin()
    for number, rows in enumerate(parts.ranges):
        parts.keep(number, {name: array[rows.start : rows.stop] for name, array in arrays.items()})
    return parts


def score(samples, reference, features, with_classes=True):
    network = Inception(with_classes, narrow=NARROW)  # says the device, and whether there are probabilities
    values, unavailable, counts = ReferenceScorer(reference, network, share_work(None), features).score(samples)
    assert counts == {}
    return values, unavailable


def features(count, seed, shift, sizes=(40, 35)):
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((count, 30)) @ np.random.default_rng(9).standard_normal((30, 2048))
    return {
        "pool": (np.abs(mixed[:, : sizes[0]]) * 0.1 + shift).astype(np.float32),
        "spatial": (np.abs(mixed[:, : sizes[1]]) * 0.2 + shift).astype(np.float32),
        "probabilities": rng.dirichlet(np.ones(1008) * 0.01, count).astype(np.float32),
    }


def test_every_metric_is_its_definition(tmp_path, pictures_of):
    """They get the right features in the right order; the functions themselves are tested in test_metrics.py."""
    ours, theirs = features(90, 1, 0.02), features(70, 2, 0.0)
    np.savez(tmp_path / "batch.npz", pictures_of(70, 8, 0))
    reference = open_reference(tmp_path / "batch.npz")
    values, unavailable = score(parts_of(tmp_path / "a", ours), reference, parts_of(tmp_path / "b", theirs, 33))
    assert tuple(sorted(values)) == tuple(sorted(NAMES)) and not unavailable
    for name, kind in (("fid", "pool"), ("sfid", "spatial")):
        gaussians = (Moments.of(sets[kind]).gaussian for sets in (ours, theirs))
        assert values[name] == pytest.approx(metrics.frechet_distance(*itertools.chain(*gaussians)), rel=1e-6)
    assert values["inception_score"] == pytest.approx(metrics.inception_score(ours["probabilities"]))
    x, y = (torch.from_numpy(one["pool"]) for one in (ours, theirs))
    assert (values["precision"], values["recall"]) == metrics.precision_recall(y, x)
    assert values["precision"] != values["recall"] and values["kid"] == metrics.kernel_distance(y, x)


def test_a_set_against_itself(tmp_path, pictures_of):
    same = features(60, 1, 0.0)
    np.savez(tmp_path / "batch.npz", pictures_of(60, 8, 0))
    reference = open_reference(tmp_path / "batch.npz")
    values, _ = score(parts_of(tmp_path / "a", same, 13), reference, parts_of(tmp_path / "b", same, 60))
    assert abs(values["fid"]) < 1e-6 and abs(values["sfid"]) < 1e-6
    assert values["precision"] == values["recall"] == 1
    others, _ = score(parts_of(tmp_path / "c", features(60, 2, 0.5)), reference, parts_of(tmp_path / "d", same))
    for name in set(NAMES) - {"inception_score"}:  # no other set is as near to the reference
        assert (values[name] < others[name]) == (METRICS[name].better == "lower")


def test_what_can_t_be_scored_is_said(tmp_path, pictures_of):
    ours = features(30, 1, 0.0, sizes=(128, 35))
    del ours["probabilities"]
    mean, covariance = ours["pool"].mean(axis=0), np.cov(ours["pool"], rowvar=False)
    np.savez(tmp_path / "edm.npz", mu=mean, sigma=covariance)
    parts = parts_of(tmp_path / "a", ours)
    values, unavailable = score(parts, open_reference(tmp_path / "edm.npz", NARROW), None, False)
    assert values.keys() == {"fid"} and values["fid"] == pytest.approx(0, abs=1e-4)
    assert "mu_s" in unavailable["sfid"] and "fc" in unavailable["inception_score"] and "arr_0" in unavailable["recall"]
    assert set(values) | set(unavailable) == set(NAMES)
    np.savez(tmp_path / "three.npz", pictures_of(3, 8, 0))
    three = parts_of(tmp_path / "b", {key: array[:3] for key, array in ours.items()})
    values, unavailable = score(parts, open_reference(tmp_path / "three.npz"), three, False)
    assert "more than 3" in unavailable["precision"] and "kid" in values and "fid" in values


def test_statistics_in_the_file_decide_over_its_pictures(tmp_path, pictures_of):
    ours, theirs = features(40, 1, 0.0, sizes=(128, 35)), features(40, 2, 0.5, sizes=(128, 35))
    mu, sigma = ours["pool"].mean(axis=0), np.cov(ours["pool"].astype(np.float64), rowvar=False)
    np.savez(tmp_path / "adm.npz", pictures_of(40, 8, 0), mu=mu, sigma=sigma)
    reference = open_reference(tmp_path / "adm.npz", NARROW)
    values, _ = score(parts_of(tmp_path / "a", ours), reference, parts_of(tmp_path / "b", theirs))
    assert values["fid"] == pytest.approx(0, abs=1e-4) and values["sfid"] > 5 and values["precision"] == 0


def warnings(samples, reference):
    with torch.device("meta"):
        network = Inception(with_classes=False)
    return ReferenceScorer(reference, network, share_work(None)).warnings(samples)


def test_small_counts_are_warned_of(tmp_path, pictures_of):
    np.savez(tmp_path / "batch.npz", pictures_of(5, 8, 0))
    reference = open_reference(tmp_path / "batch.npz")
    assert ["2,000 samples" in warnings(2000, reference)[0], "5 pictures" in warnings(2000, reference)[1]] == [True] * 2
    assert len(warnings(50_000, reference)) == 1
    np.savez(tmp_path / "adm.npz", pictures_of(5, 8, 0), mu=np.zeros(2048), sigma=np.eye(2048))
    assert warnings(50_000, open_reference(tmp_path / "adm.npz")) == []  # its statistics are of others


def test_extraction_in_parts_is_extraction_at_once(tmp_path, pictures_of, inception_file, monkeypatch):
    pictures = pictures_of(9, 32, 0)
    np.savez(tmp_path / "a.npz", pictures)
    network, opened = load_inception(inception_file), open_pictures(tmp_path / "a.npz")
    extracted = []
    monkeypatch.setattr(image_sets, "part_size", lambda count, batch_size: 4)
    monkeypatch.setattr(image_sets, "extract", lambda *given: extracted.append(len(given[1])) or extract(*given))
    _, parts = image_sets.extract_all(opened, tmp_path / "cache", network, share_work(None))
    (parts.data / "pool-00001.npy").unlink()
    _, parts = image_sets.extract_all(opened, tmp_path / "cache", network, share_work(None))
    assert extracted == [4, 4, 1, 4] and parts.missing() == []
    whole = extract(network, torch.from_numpy(pictures.transpose(0, 3, 1, 2)))
    for name in ("pool", "spatial", "probabilities"):
        np.testing.assert_allclose(np.concatenate(list(parts.arrays(name))), whole[name], rtol=1e-4, atol=1e-5)


def test_what_takes_long_with_many_samples_is_said(tmp_path, capsys, monkeypatch, pictures_of):
    """Each stage of a scoring, and a hash of a large file; bars come to their ends."""
    samples, others = (parts_of(tmp_path / name, features(30, seed, 0.0)) for seed, name in enumerate("ab"))
    np.savez(tmp_path / "batch.npz", pictures_of(30, 8, 0))
    score(samples, open_reference(tmp_path / "batch.npz"), others)
    told = capsys.readouterr()
    for what in ("the samples, pool", "the reference, pool", "the samples, spatial", "the reference, spatial"):
        assert f"mean and covariance of {what}: 100%" in told.err and "30/30" in told.err
    assert "precision and recall: 100%" in told.err and "120/120" in told.err  # 2·(n + m)
    assert "KID: 100%" in told.err and "90/90" in told.err  # n + 2·m
    assert told.out.splitlines() == [f"distance of both means and covariances, {kind}" for kind in ("pool", "spatial")]
    assert samples.missing(share_work(None)) == [] and "checking a: 100%" in capsys.readouterr().err
    (tmp_path / "large.npz").touch()
    os.truncate(tmp_path / "large.npz", 2 * 10**8 + 1)  # a hole, which takes no room
    monkeypatch.setattr(image_sets, "sha256", lambda path: "0")
    image_sets.hash_of(tmp_path / "large.npz", share_work(None))
    assert "large.npz, 200 MB, for its hash" in capsys.readouterr().out
