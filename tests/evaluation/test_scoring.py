"""The command python fid.py. The references are the same steps taken by hand, and other ways to the same numbers."""

import json
import shutil
import tarfile
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import RGB, ROOT, TINY_KL, assert_refused, interrupt, open_pictures, read_csv, read_json, save_checkpoint
from conftest import score as launch
from forked import run_python
from PIL import Image

from tread.checkpoints import checkpoint
from tread.data.latents import LatentSpec
from tread.diffusion.edm import EDM
from tread.diffusion.labels import seeded_labels
from tread.diffusion.sampling import Model, Sampler, draw_pictures
from tread.encoders import inception
from tread.encoders.autoencoder import load_decoder
from tread.encoders.inception import extract, load_inception
from tread.evaluation import image_sets, score_files, scorers, scoring
from tread.evaluation.metrics import Moments, frechet_distance, inception_score
from tread.evaluation.scoring import ScoringOptions, plan_scoring, read_options, settle_crop
from tread.preparing import digits
from tread.preparing.images import Crop
from tread.runtime.distributed import share_work
from tread.runtime.schema import read

OPTIONS = ("num_samples=10", "steps=2", "batch_size=4")
SCORED = ("checkpoint=results/a", "reference=reference.npz", *OPTIONS)


def refusal(folder, *overrides: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        launch(folder, *overrides)
    return str(stopped.value)


@pytest.fixture(autouse=True)
def weights(inception_file, monkeypatch):
    monkeypatch.setenv(inception.VARIABLE, str(inception_file))


@pytest.fixture
def run(tmp_path, composed, pictures_of):
    """results/a with a checkpoint, and reference.npz, of 12 pictures."""
    np.savez(tmp_path / "reference.npz", pictures_of(12, 16, 0))
    network, _ = save_checkpoint(tmp_path / "results/a", composed)
    return network


def test_a_checkpoint_is_scored_by_its_samples(tmp_path, run, inception_file, pictures_of):
    text = launch(tmp_path, *SCORED, "save_samples=true")
    folder = tmp_path / "results/a/step_0000003"

    sampler, labels = Sampler(steps=2, batch_size=4), seeded_labels(range(10), 5, "random")
    pictures = torch.cat(list(draw_pictures(Model(EDM(), run), load_decoder(RGB), range(10), labels, sampler)))
    with np.load(folder / "samples.npz") as samples:
        assert np.array_equal(samples["arr_0"], pictures.permute(0, 2, 3, 1))
        assert np.array_equal(samples["arr_1"], labels)
    network = load_inception(inception_file)
    ours = extract(network, pictures)
    theirs = extract(network, torch.from_numpy(pictures_of(12, 16, 0).transpose(0, 3, 1, 2)))
    found = read_json(folder / "fid.json")
    for metric, kind in (("fid", "pool"), ("sfid", "spatial")):
        a, b = (Moments.of(features[kind]).gaussian for features in (ours, theirs))
        assert found[metric] == pytest.approx(frechet_distance(*a, *b), rel=1e-4)
    assert found["inception_score"] == pytest.approx(inception_score(ours["probabilities"]), rel=1e-4)

    assert found["counts"] == dict.fromkeys(["fid", "sfid", "inception_score", "precision", "recall", "kid"], 10)
    assert (found["step"], found["ema"], found["seeds"], found["reference_count"]) == (3, True, [0, 9], 12)
    settings = found["settings"]
    assert (settings["sampler"], settings["steps"], settings["nfe"], settings["guidance"]) == ("heun", 2, 3, "none")
    assert (settings["labels"], settings["dtype"]) == ("random", "fp32")
    assert settings["checkpoint"] == checkpoint.find(folder).sha256("ema") and len(settings["inception"]) == 64
    assert {"git", "torch"} <= set(found["versions"])
    assert {"sampling", "features", "reference", "scoring", "total"} <= set(found["seconds"])
    assert "FID" in text and "10 samples against 12" in text and "biased upwards" in text
    assert np.asarray(Image.open(folder / "fid.png")).shape == (2 * 66 - 2, 8 * 66 - 2, 3)
    (line,) = read_csv(tmp_path / "results/a/fid.csv")
    assert float(line["fid"]) == found["fid"] and line["count"] == "10" and line["nfe"] == "3"
    assert not list(folder.glob(".fid-*"))  # the parts are gone

    assert "scored already" in launch(tmp_path, *SCORED)
    launch(tmp_path, *SCORED, "guidance=cfg", "guidance.scale=2")
    assert read_json(folder / "fid-1.json") == found and (folder / "samples-1.npz").exists()
    guided = read_json(folder / "fid.json")
    assert guided["settings"]["guidance"] == "cfg 2" and guided["settings"]["nfe"] == 6
    assert guided["fid"] != found["fid"] and not (folder / "samples.npz").exists()
    again = launch(tmp_path, *SCORED)
    assert "scored already" in again and "fid-1.json" in again
    assert len(read_csv(tmp_path / "results/a/fid.csv")) == 2


@pytest.mark.slow
def test_the_number_of_processes_changes_nothing(tmp_path, run):
    launch(tmp_path, *SCORED, "save_samples=true", "out=one")
    options = (*SCORED, "save_samples=true", "out=two", f"cache={tmp_path}/other_cache")
    done = run_python(ROOT / "fid.py", *options, cwd=tmp_path, processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    one, two = read_json(tmp_path / "one/fid.json"), read_json(tmp_path / "two/fid.json")
    assert two["processes"] == 2 and one["processes"] == 1
    for metric in one["counts"]:
        assert two[metric] == pytest.approx(one[metric], rel=1e-4, abs=1e-6)
    with np.load(tmp_path / "one/samples.npz") as a, np.load(tmp_path / "two/samples.npz") as b:
        assert np.array_equal(a["arr_1"], b["arr_1"])
        assert (np.abs(a["arr_0"].astype(int) - b["arr_0"]) <= 1).mean() >= 0.999
    assert done.stdout.count("  FID") == 1
    launch(tmp_path, *options, "batch_size=5", "out=five")
    five = read_json(tmp_path / "five/fid.json")
    for metric in ("fid", "sfid", "inception_score", "kid"):
        assert five[metric] == pytest.approx(one[metric], rel=1e-4, abs=1e-6)


def test_stopped_work_goes_on_with_the_parts_that_are_missing(tmp_path, run, monkeypatch, capsys):
    launch(tmp_path, *SCORED, "out=whole")
    calls = interrupt(monkeypatch, scoring, "draw_pictures", 3)
    assert refusal(tmp_path, *SCORED) == "130" and "go on" in capsys.readouterr().err
    next((tmp_path / "results/a/step_0000003").glob(".fid-*/data/pictures-00001.npy")).write_bytes(b"damaged")
    launch(tmp_path, *SCORED)
    assert [list(seeds) for _, _, seeds, *_ in calls] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [4, 5, 6, 7], [8, 9]]
    found, whole = read_json(tmp_path / "results/a/step_0000003/fid.json"), read_json(tmp_path / "whole/fid.json")
    assert {key: found[key] for key in found["counts"]} == {key: whole[key] for key in whole["counts"]}


def test_many_checkpoints_are_scored_and_the_done_ones_skipped(tmp_path, run, composed):
    options = ["reference=reference.npz", *OPTIONS]
    launch(tmp_path, "checkpoint=results/a/latest", *options)
    save_checkpoint(tmp_path / "results/a", composed, step=12)
    text = launch(tmp_path, "checkpoint='results/a/step_*'", *options)
    assert text.count("scored already") == 1 and text.count("written") == 1
    lines = read_csv(tmp_path / "results/a/fid.csv")
    assert [line["step"] for line in lines] == ["3", "12"] and lines[0]["fid"] != lines[1]["fid"]
    assert "no checkpoint at results/b/step_*" in refusal(tmp_path, "checkpoint='results/b/step_*'", *options)


def test_pictures_made_elsewhere_and_statistics(tmp_path, pictures_of):
    for name, count, seed in (("ours", 8, 1), ("theirs", 10, 0)):
        np.savez(tmp_path / f"{name}.npz", pictures_of(count, 16, seed))
        for i, picture in enumerate(pictures_of(count, 16, seed)):
            (tmp_path / name).mkdir(exist_ok=True)
            Image.fromarray(picture).save(tmp_path / name / f"{i:03d}.png")
    launch(tmp_path, "samples=ours.npz", "reference=theirs.npz")
    launch(tmp_path, "samples=ours", "reference=theirs", "out=folders")
    text = launch(tmp_path, "reference=theirs", "save_reference=stats/theirs.npz")
    assert "statistics of 10 pictures" in text
    assert "crop=" not in launch(tmp_path, "samples=ours.npz", "reference=stats/theirs.npz", "out=statistics")
    text = launch(tmp_path, "samples=ours", "reference=stats/theirs.npz", "out=cropped", "crop=16")
    assert "crop=16 is of the samples: the statistics of stats/theirs.npz stay as they are" in text
    names = ("ours.fid.json", "folders/fid.json", "statistics/fid.json")
    npz, folders, statistics = (read_json(tmp_path / name) for name in names)
    assert npz["count"] == 8 and npz["fid"] > 0.1
    assert all(folders[metric] == npz[metric] for metric in npz["counts"])
    assert [statistics[m] for m in ("fid", "sfid")] == pytest.approx([npz[m] for m in ("fid", "sfid")], rel=1e-9)
    assert {"precision", "recall", "kid"} <= set(statistics["unavailable"])


def test_damaged_pictures_stop_a_score_or_are_left_out_and_counted(tmp_path, pictures_of, monkeypatch):
    """Those whose heads are whole are found beside the work, a whole part of them too: the score is as without them."""
    monkeypatch.setattr(image_sets, "part_size", lambda count, batch_size: 2)
    for name, seed in (("ours", 1), ("theirs", 0), ("whole", 0)):
        (tmp_path / name).mkdir()
        for i, picture in enumerate(pictures_of(9, 16, seed)):
            if name != "whole" or i not in (2, 3, 6):
                Image.fromarray(picture).save(tmp_path / name / f"{i}.png")
    for i in (2, 3, 6):
        path = tmp_path / f"theirs/{i}.png"
        path.write_bytes(path.read_bytes()[:-200])
    given = ["samples=ours", "reference=theirs"]
    stopped = refusal(tmp_path, *given)
    assert "theirs: damaged pictures, 3 in all" in stopped
    assert all(f"{i}.png can't be read" in stopped for i in (2, 3, 6))
    (tmp_path / "ours/7.png").write_bytes(b"")
    text = launch(tmp_path, *given, "on_error=skip", "out=skipped")
    assert "theirs: damaged pictures that are left out, 3 in all" in text and "7.png: it is empty" in text
    assert "note: 1 damaged pictures of samples were left out" in text and "3 damaged pictures of the ref" in text
    (tmp_path / "ours/7.png").unlink()
    launch(tmp_path, "samples=ours", "reference=whole", "out=whole_score")
    skipped, whole = (read_json(tmp_path / name / "fid.json") for name in ("skipped", "whole_score"))
    assert (skipped["skipped"], skipped["reference_skipped"]) == (1, 3) and "skipped" not in whole
    assert skipped["reference_count"] == whole["reference_count"] == 6 and skipped["counts"] == whole["counts"]
    assert skipped["settings"]["samples"] == whole["settings"]["samples"]
    assert all(skipped[metric] == pytest.approx(whole[metric], rel=1e-4, abs=1e-6) for metric in whole["counts"])


def test_features_are_kept_under_the_hash_of_their_pictures(tmp_path, inception_file, pictures_of):
    for name, seed in (("a", 0), ("b", 1)):
        np.savez(tmp_path / f"{name}.npz", pictures_of(3, 16, seed))
    shutil.copy(tmp_path / "a.npz", tmp_path / "copy.npz")
    network, processes, folders = load_inception(inception_file), share_work(None), []
    for name, network.sha256 in (("a", "one"), ("copy", "one"), ("b", "one"), ("a", "two")):
        pictures = open_pictures(tmp_path / f"{name}.npz")
        folders.append(image_sets.extract_all(pictures, tmp_path / "cache", network, processes)[1].work)
    assert folders[0] == folders[1] and len(set(folders)) == 3


def test_the_digits_are_judged_without_a_download(tmp_path, composed):
    network, folder = save_checkpoint(tmp_path / "results/d", composed, digits.MEANING, embedded="digits")
    text = launch(tmp_path, "checkpoint=results/d/latest", "steps=2", "num_samples=40", "labels=balanced")
    labels, sampler = torch.arange(40) % 10, Sampler(steps=2, batch_size=40)
    model, decoder = Model(EDM(), network), load_decoder(digits.MEANING)
    pictures = torch.cat(list(draw_pictures(model, decoder, range(40), labels, sampler)))
    expected, found = scorers.judge_digits(pictures.numpy(), labels.numpy()), read_json(folder / "fid.json")
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    counts = {"label_agreement": 40, "label_agreement_real": 355, "frechet_pixels": 40, "frechet_pixels_real": 1442}
    assert found["counts"] == counts and "fid" in found["unavailable"]
    assert [len(labels) for _, labels in digits.digits_parts().values()] == [1442, 355]
    assert "label_agreement" in text and "FID                  unavailable" in text
    np.savez(tmp_path / "reference.npz", np.zeros((4, 8, 8, 3), np.uint8))
    assert "grey" in refusal(tmp_path, "checkpoint=results/d", "reference=reference.npz")


def test_a_scorer_of_ones_own_needs_no_other_file(tmp_path, composed, monkeypatch):
    """Brightness by what is kept with each part: the whole way, up to fid.json, against the pictures' own mean."""

    class Brightness(scorers.Scorer):
        metrics = ("brightness",)

        def prepare(self, pictures):
            return {"means": pictures.double().mean(dim=(1, 2, 3)).numpy()}

        def score(self, samples):
            means = np.concatenate(list(samples.arrays("means")))
            return {"brightness": means.mean(), "brightness_real": 1.0}, {"fid": "it is dark"}, {"brightness_real": 3}

        def warnings(self, samples):
            return [f"only {samples}"]

    monkeypatch.setitem(scorers.EMBEDDED, ("digits", False), lambda *_: Brightness())
    _, folder = save_checkpoint(tmp_path / "results/d", composed, digits.MEANING, embedded="digits")
    text = launch(tmp_path, "checkpoint=results/d", *OPTIONS, "save_samples=true")
    found = read_json(folder / "fid.json")
    with np.load(folder / "samples.npz") as samples:
        assert found["brightness"] == pytest.approx(samples["arr_0"].mean())
    assert found["counts"] == {"brightness": 10, "brightness_real": 3} and found["warnings"] == ["only 10"]
    assert "note: only 10" in text and "unavailable: it is dark" in text


def test_the_columns_of_a_table_stay():
    """As files of earlier versions begin: another head would begin a new file."""
    metrics = "fid,sfid,inception_score,precision,recall,kid,label_agreement,frechet_pixels,clip_score"
    rest = "reference,reference_count,sampler,steps,nfe,flops_relative,guidance,weak_network"
    rest += ",labels,first_seed,weights,dtype,checkpoint"
    assert ",".join(score_files.columns({})) == f"time,step,count,{metrics},{rest}"


def test_files_that_are_there_already_are_kept(tmp_path, run):
    """The user's own, and an older scoring's; a fid.json that is none of ours is left alone."""
    (tmp_path / "mine").mkdir()
    own = {"samples.npz": "mine", "fid.png": "mine", "fid.json": "[1]", "fid.csv": "a,b\n1,2\n"}
    for name, content in own.items():
        (tmp_path / "mine" / name).write_text(content)
    launch(tmp_path, *SCORED, "save_samples=true", "out=mine")
    kept = {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir() if "-1." in path.name}
    assert kept == {name.replace(".", "-1."): content.encode() for name, content in own.items()}
    assert read_json(tmp_path / "mine/fid.json")["count"] == 10

    (tmp_path / "mine/fid.json").unlink()  # samples.npz then belongs to no score
    score_files.ScoreFiles(tmp_path / "mine").make_room({}, ["fid.json", "fid.png"])
    assert (tmp_path / "mine/samples.npz").exists() and not (tmp_path / "mine/fid.png").exists()

    before = (tmp_path / "reference.npz").read_bytes()
    refused = refusal(tmp_path, "reference=reference.npz", "save_reference=reference.npz")
    assert "is there already" in refused and (tmp_path / "reference.npz").read_bytes() == before


def test_a_folder_inside_a_tar_is_scored_beside_the_tar(tmp_path, run, pictures_of):
    for i, picture in enumerate(pictures_of(5, 16, 1)):
        (tmp_path / "photos/val").mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(tmp_path / f"photos/val/{i}.png")
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        tar.add(tmp_path / "photos", arcname="photos")
    launch(tmp_path, "samples=photos.tar/photos/val", "reference=reference.npz")
    assert read_json(tmp_path / "val.fid.json")["count"] == 5


def test_what_decides_about_the_pictures_is_in_the_settings(tmp_path, run, composed):
    found = checkpoint.find(tmp_path / "results/a")
    base = dict(composed(name="fid"), checkpoint="x", reference="r")

    def settings_of(latents=RGB, reference="r", config=found.info["config"], info=None, **changed):
        info = found.info | {"latents": asdict(latents), "config": config} | (info or {})
        one = checkpoint.Checkpoint(found.folder, info)
        return plan_scoring(read(base | changed, ScoringOptions), one, "fp32").fingerprint(reference, "i")

    usual = settings_of()
    cfg = {"kind": "cfg", "scale": 1.5, "strong": 0.0, "weak": 0.0}
    changes = {"first_seed": 1, "labels": "balanced", "steps": 5, "batch_size": 7, "weights": "model", "guidance": cfg}
    sparse = cfg | {"kind": "sparse", "weak": 0.5}
    guided, routed = settings_of(guidance=cfg), settings_of(guidance=sparse)
    assert all(settings_of(**{key: value}) != usual for key, value in changes.items())
    assert settings_of(num_samples=9) != usual and settings_of(latents=replace(RGB, scale=2.0)) != usual
    assert guided != settings_of(guidance=cfg | {"scale": 1.5000001})
    assert settings_of(solver="euler") != usual and settings_of(reference="other") != usual
    assert settings_of(config=found.info["config"] | {"objective": "rf"}) != usual
    moved = composed("model.depth=6", "model.routes.0.end=-1")["model"]["routes"]  # same weights, another route
    config = found.info["config"] | {"model": found.info["config"]["model"] | {"routes": moved}}
    assert settings_of(guidance=sparse, config=config) != routed
    assert settings_of(guidance=cfg, config=config) == guided
    assert settings_of(out="elsewhere", cache="there", save_samples=True) == usual
    heads = found.info["config"] | {"model": found.info["config"]["model"] | {"num_heads": 1}}
    assert settings_of(config=heads) == usual  # trained weights have their own number of heads
    two, one = (settings_of(info={"predicts": "F"}, config=config) for config in (found.info["config"], heads))
    assert two != one and json.loads(json.dumps(one["network"])) == one["network"]  # imported ones what was typed
    # as scores of earlier versions have them: their order names the folder of unfinished work
    names = "step checkpoint weights num_samples first_seed labels sampler steps nfe guidance dtype batch_size decoder"
    assert list(usual) == [*names.split(), "latents", "edm", "reference", "inception"]
    assert list(routed) == [*list(usual)[:10], "routes", *list(usual)[10:]]
    (own,) = routed["routes"]
    assert list(own) == ["start", "end", "selection_ratio", "fp32", "select"]
    earlier = composed("model.depth=6", "model.routes.0.rejoin=0")["model"]["routes"]
    config = found.info["config"] | {"model": found.info["config"]["model"] | {"routes": earlier}}
    assert settings_of(guidance=sparse, config=config)["routes"] == [own | {"rejoin": 0}]


@pytest.mark.slow
def test_a_score_says_if_its_pictures_were_not_decoded_in_fp32(tmp_path, run, composed):
    """It is another score than that in fp32."""
    import diffusers

    torch.manual_seed(0)
    diffusers.AutoencoderKL(**TINY_KL).save_pretrained(tmp_path / "kl")
    kl = LatentSpec((4, 8, 8), RGB.classes, str(tmp_path / "kl"), scale_applied=True)
    save_checkpoint(tmp_path / "results/b", composed, kl)
    scored = ("checkpoint=results/b", *SCORED[1:], "save_samples=true")
    usual, text = launch(tmp_path, *scored), launch(tmp_path, *scored, "decode_precision=bf16")
    note = "pictures were decoded in bf16; published numbers are of fp32"
    assert f"note: {note}" in text and note not in usual
    folder = tmp_path / "results/b/step_0000003"
    new, old = read_json(folder / "fid.json"), read_json(folder / "fid-1.json")
    assert note in new["warnings"] and note not in old["warnings"]
    assert new["settings"] == old["settings"] | {"decode_precision": "bf16"} != old["settings"]
    with np.load(folder / "samples.npz") as ours, np.load(folder / "samples-1.npz") as theirs:
        differences = np.abs(ours["arr_0"].astype(int) - theirs["arr_0"])
    assert 0 < differences.mean() < 1


def test_a_reference_is_read_as_the_training_photos_were(tmp_path, run, composed, pictures_of):
    """By what the checkpoint's dataset recorded, unless asked otherwise; upright and on white without a checkpoint."""
    (tmp_path / "photos").mkdir()
    for number, picture in enumerate(pictures_of(4, 32, 0)):
        Image.fromarray(picture).save(tmp_path / f"photos/{number}.png")
    save_checkpoint(tmp_path / "results/b", composed, replace(RGB, orientation="exif"))
    given = ["reference=photos", "crop=16", "num_samples=4", "steps=2"]
    assert "orientation=exif alpha=drop" in launch(tmp_path, "checkpoint=results/b", *given)
    settings = read_json(tmp_path / "results/b/step_0000003/fid.json")["settings"]
    assert settings["reference"] == open_pictures(tmp_path / "photos", 16, "exif", "drop").sha256
    both = "checkpoint='results/*/step_*'"
    assert "photos read with orientation=exif and stored" in refusal(tmp_path, both, *given)
    seen = (RGB, replace(RGB, orientation="exif"))
    stored, turned = (SimpleNamespace(saved=SimpleNamespace(latents=latents)) for latents in seen)
    for asked, plans, found in (
        ([], [], ("exif", "white")),
        ([], [stored], ("stored", "drop")),
        (["alpha=white"], [turned], ("exif", "white")),
        (["orientation=stored"], [stored, turned], ("stored", "drop")),
    ):
        options = read_options(composed("reference=a", "save_reference=b.npz", "crop=16", *asked, name="fid"))
        assert settle_crop(options, plans) == Crop(16, *found)


def test_bad_input_is_refused_before_any_work(tmp_path, run, composed, pictures_of, monkeypatch):
    monkeypatch.setattr(scoring, "draw_pictures", None)
    monkeypatch.setattr(image_sets, "extract", None)
    np.savez(tmp_path / "large.npz", pictures_of(4, 32, 0))
    np.savez(tmp_path / "stats.npz", mu=np.zeros(128), sigma=np.eye(128))
    np.savez(tmp_path / "fid_stats.npz", mu=np.zeros(2048), sigma=np.eye(2048))
    save_checkpoint(tmp_path / "results/raw", composed, parts=("model",))
    _, cut = save_checkpoint(tmp_path / "results/cut", composed)
    (cut / "ema.safetensors").write_bytes(b"cut")
    assert_refused(
        partial(launch, tmp_path),
        ("name one of checkpoint",),
        ("checkpoint=results/a", "needs reference=…"),
        ("samples=reference.npz", "reference=… is needed"),
        ("samples=reference.npz", "reference=7", "reference is 7, but must be str"),
        ("checkpoint=results/a", "save_samples=true", "inception=a.pth", "inception=a.pth is read by nothing here"),
        ("samples=large.npz", "reference=a.npz", "num_samples=2", "guidance=cfg", "num_samples, guidance: only for"),
        ("checkpoint=results/a", "reference=large.npz", "16×16, but large.npz of 32×32"),
        ("samples=large.npz", "reference=reference.npz", "32×32, but reference.npz of 16×16"),
        ("checkpoint=results/raw", "reference=reference.npz", "holds no ema part.*weights=model"),
        ("checkpoint=results/a", "reference=reference.npz", "inception=nowhere", "nowhere is not there"),
        ("checkpoint=results/a", "reference=reference.npz", "alpha=white", "alpha=white needs crop="),
        ("checkpoint=results/a", "reference=cifar10", "crop=16", "crop=16 is for folders and tars of photos, but none"),
        ("reference=stats.npz", "save_reference=new.npz", "holds no pictures to make statistics of"),
        ("checkpoint=results/a", "reference=reference.npz", "out=reference.npz", "could not be written"),
        ("samples=reference.npz", "reference=fid_stats.npz", "another network: the Inception gives 128"),
        ("checkpoint=results/cut", "reference=reference.npz", "ema.safetensors is damaged"),
        ("reference=reference.npz", "save_reference=stats.txt", "must end in .npz"),
        ("checkpoint=results/a", "reference=reference.npz", "decode_precision=fp16", "decode_precision is 'fp16'"),
        ("checkpoint=results/a", "reference=reference.npz", "decode_precision=bf16", "this network draws pixels"),
        ("checkpoint=hf:user/name", "reference=reference.npz", "hf:user/name has no folder of yours"),
    )
    assert not list((tmp_path / "results/a/step_0000003").glob("*fid*"))


def test_a_score_beside_its_samples_has_their_name(tmp_path, monkeypatch):
    """A folder's dot begins no suffix, as in cfg1.5."""
    folder = tmp_path / "cfg1.5"
    folder.mkdir()
    (tmp_path / "a.npz").touch()
    monkeypatch.chdir(folder)
    places = {str(folder): "cfg1.5", ".": "cfg1.5", f"{folder}/": "cfg1.5", "../a.npz": "a"}
    for samples, name in places.items():
        found = scoring.files_beside(SimpleNamespace(out=None, samples=samples)).path("fid.json")
        assert found.resolve() == tmp_path.resolve() / f"{name}.fid.json"
    above = scoring.files_beside(SimpleNamespace(out=None, samples="..")).path("fid.json")
    assert above == tmp_path.resolve().parent / f"{tmp_path.name}.fid.json"
