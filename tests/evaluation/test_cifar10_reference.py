"""reference=cifar10 and cifar10-test. Reference: the same scores against the pictures themselves."""

import numpy as np
import pytest
from conftest import ROOT, open_reference, read_json, save_checkpoint, score

from tread.data.writer import write_dataset
from tread.encoders import inception
from tread.evaluation import reference
from tread.evaluation.metrics import Moments, frechet_distance
from tread.preparing import cifar10


def test_the_shipped_statistics_are_of_50_000_pictures_of_32_by_32(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = open_reference(reference.Path("cifar10"))
    assert (found.where, found.count, found.resolution, found.pictures) == ("cifar10", 50_000, (32, 32), None)
    for kind, size, total, trace in (("pool", 2048, 636.278228, 192.361340), ("spatial", 2023, 489.391125, 359.724533)):
        mean, covariance = found.stated[kind]
        assert covariance.shape == (size, size) and np.array_equal(covariance, covariance.T)
        assert np.allclose([mean.sum(), covariance.trace()], [total, trace], rtol=1e-8)
        assert np.linalg.eigvalsh(covariance[:300, :300]).min() > 0.002
    assert (ROOT / "tread/evaluation/cifar10.npz").stat().st_size < 17e6
    (tmp_path / "cifar10").mkdir()  # a folder of this name is meant first
    with pytest.raises(ValueError, match="cifar10 has no pictures"):
        open_reference(reference.Path("cifar10"))


def test_packed_statistics_are_the_whole_ones_rounded_and_damaged_ones_are_refused(tmp_path):
    rng = np.random.default_rng(0)
    (mu, sigma), ours = (Moments.of(rng.standard_normal((300, 128)) ** 2 + at).gaussian for at in (0, 0.3))
    packed = {"mu": mu.astype(np.float32), "sigma_triu": sigma[np.triu_indices(128)].astype(np.float32)}
    np.savez(tmp_path / "packed.npz", **packed)
    found = open_reference(tmp_path / "packed.npz", narrow=16).stated["pool"]
    assert np.array_equal(found[1], sigma.astype(np.float32)) and np.array_equal(found[0], packed["mu"])
    assert frechet_distance(*ours, *found) == pytest.approx(frechet_distance(*ours, mu, sigma), abs=1e-5)
    np.savez(tmp_path / "cut.npz", mu=mu, sigma_triu=packed["sigma_triu"][:-1])
    with pytest.raises(ValueError, match=r"sigma \(127, 127\) are statistics of another network"):
        open_reference(tmp_path / "cut.npz", narrow=16)


@pytest.fixture(scope="module")
def place(tmp_path_factory, inception_file):
    """data/cifar10, of 9 pictures, and data/cifar10-heldout, of 5; their packed statistics as the shipped ones."""
    folder, files = tmp_path_factory.mktemp("cifar10"), cifar10.standin()
    for name, file, count in (("cifar10", "data_batch_1.bin", 9), ("cifar10-heldout", "test_batch.bin", 5)):
        pictures, labels = cifar10.pictures_of(files[file])
        write_dataset(folder / "data" / name, cifar10.MEANING, [(pictures[:count], labels[:count])])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(inception.VARIABLE, str(inception_file))
        score(folder, "reference=data/cifar10", "save_reference=shipped.npz", "packed=true")
        patch.setitem(reference.SHIPPED, "cifar10", folder / "shipped.npz")
        yield folder


def test_scores_by_shipped_statistics_are_those_against_the_pictures(place):
    def scored(*options) -> dict:
        score(place, "samples=data/cifar10-heldout", "out=score", *options)
        return read_json(place / "score/fid.json")

    whole, cached = scored("reference=data/cifar10"), scored("reference=cifar10")
    shipped = scored("reference=cifar10", "cache=empty")
    assert (shipped["reference"], shipped["reference_count"], shipped["count"]) == ("cifar10", 9, 5)
    for metric in ("fid", "sfid"):
        assert shipped[metric] == cached[metric] == pytest.approx(whole[metric], abs=1e-5)
    assert {*shipped["unavailable"]} == {"precision", "recall", "kid"} and "precision" not in shipped
    assert all("reference_features=true makes them" in reason for reason in shipped["unavailable"].values())
    made = scored("reference=cifar10", "reference_features=true", "cache=empty")
    for metric in ("precision", "recall", "kid"):
        assert cached[metric] == made[metric] == whole[metric]
    assert not made["unavailable"] and made["settings"] == cached["settings"] == shipped["settings"]
    assert made["reference_pictures"] == cached["reference_pictures"] != shipped["reference_pictures"] is None


def test_a_cache_makes_no_other_score_of_a_network(place, composed):
    """A score without the pictures' features is that of a cache that has them, until they are asked for."""
    save_checkpoint(place / "results/b", composed, cifar10.MEANING, embedded="cifar10", path="data/cifar10")
    drawn = ("checkpoint=results/b", "num_samples=4", "steps=2", "batch_size=4", "reference=cifar10")
    asked, folder, found = "reference_features=true", place / "results/b/step_0000003", []
    for options in (["cache=none"], [], [asked], ["cache=none"], [asked]):
        score(place, *drawn, *options)
        found.append(read_json(folder / "fid.json"))  # with the time of its making
    assert found[0] == found[1] and found[2] == found[3] == found[4] and not (folder / "fid-1.json").exists()
    assert found[0]["fid"] == found[2]["fid"] and [*found[0]["unavailable"]] == ["precision", "recall", "kid"]
    assert found[2]["reference_pictures"] and not {*found[2]["unavailable"]} & {"precision", "kid"}


def test_a_network_is_scored_against_its_own_test_pictures(place, composed):
    save_checkpoint(place / "results/a", composed, cifar10.MEANING, embedded="cifar10", path="data/cifar10")
    drawn = ("checkpoint=results/a", "num_samples=4", "steps=2", "batch_size=4")
    score(place, *drawn, "reference=cifar10-test")
    found = read_json(place / "results/a/step_0000003/fid.json")
    assert (found["reference"], found["reference_count"], found["count"]) == ("data/cifar10-heldout", 5, 4)


def test_what_does_not_fit_is_refused(place):
    def refused(said, *options):
        with pytest.raises(SystemExit, match=said):
            score(place, "samples=data/cifar10-heldout", "out=score", *options)

    wanted = "reference_features=true"
    refused("reference_features=true is for reference=cifar10", "reference=data/cifar10", wanted)
    refused("packed=true is for save_reference", "reference=data/cifar10", "packed=true")
    (place / "data/cifar10").rename(place / "data/whole")
    (place / "data/cifar10").symlink_to("cifar10-heldout")
    refused("data/cifar10 holds 5 pictures, but CIFAR-10 has 9", "reference=cifar10", wanted)
