"""Runs of other predictions, shifts and losses, and mixed values: equal however a batch is split, and as recorded."""

import conftest
import pytest
import torch
from conftest import CPU, logged, opened, read_json, same, score, take_samples
from torch.testing import assert_close

from rf import RF
from tread.checkpoints.network import build_network, read_network
from tread.checkpoints.weights import StoredWeights
from tread.data.dataset import LatentDataset
from tread.data.latents import to_network
from tread.data.loader import Loader
from tread.models.conditions import replaced
from tread.preparing import digits
from tread.runtime.distributed import split_batch
from tread.training import settings
from tread.training.step import loss, step_draws

KINDS = ("rf.predicts=x", "rf.train_shift=auto", "rf.shift=auto", "rf.contrastive=0.1")
KINDS += ("model.bottleneck=4", "model.value_residual=true")
SPARSE = ("guidance=sparse", "guidance.scale=1.5", "guidance.weak=0.5")


def launch(folder, *overrides):
    return conftest.launch(folder, "objective=rf", *overrides)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    launch(folder, "name=whole", *KINDS, "checkpoints.keep_every=3", "checkpoints.keep_last=2")
    return folder


@pytest.mark.parametrize("kept", ["all", "kept"])
@pytest.mark.parametrize("processes, micro", [(1, None), (1, 2), (2, None), (2, 1)])
def test_negatives_are_the_next_samples_of_the_global_batch(read_config, tmp_path, processes, micro, kept):
    """However it is split: the loss of each sample, written out over the whole batch."""
    cfg = read_config("objective=rf", "rf.contrastive=0.1", f"train.loss_tokens={kept}", *conftest.TINY)
    digits.prepare_digits(tmp_path / "digits/heldout", "heldout")
    data, network = LatentDataset(tmp_path / "digits/heldout"), conftest.randomized(lambda: build_network(cfg), 0, 0.1)
    draws, losses = step_draws(cfg, data.latents, 3, CPU), []
    with torch.no_grad():
        for rank in range(processes):
            rows = split_batch(8, processes, rank, micro)
            for part, batch in zip(rows, Loader(data, cfg.seed, 8, rows, CPU, beyond=1).batches(3)):
                losses += loss(cfg, network, data.latents, batch, draws.rows(part, 1), network.null(1))
        whole = data.batch(cfg.seed, 3, 8)
        x, t = to_network(whole.stored, data.latents), torch.sigmoid(draws.level)
        y, target = replaced(whole.labels, draws.drop < 0.1, network.null(1)), draws.noise - x
        v = network(RF().noised(x, t, draws.noise), t, y, draws.routes)
        terms = (v - target).square() - 0.1 * (v - torch.cat([target[1:], target[:1]])).square()
        by_token = terms.unfold(2, 2, 2).unfold(3, 2, 2).mean(dim=(1, 4, 5)).flatten(1)
        expected = by_token.gather(1, draws.routes[0][1]) if kept == "kept" else by_token
    assert_close(torch.cat(losses), expected.mean(dim=1), rtol=1e-4, atol=1e-5)


def test_posterior_noise_goes_round_with_the_samples(read_config):
    cfg = read_config("objective=rf", "rf.contrastive=0.1", *conftest.TINY)
    moments = conftest.replace(digits.MEANING, content="moments", spread="std")
    draws = step_draws(cfg, moments, 3, CPU)
    part = draws.rows(slice(4, 8), 1)
    assert len(part.level) == 4 and not torch.equal(draws.noise, draws.posterior)
    for name in ("noise", "posterior"):
        assert torch.equal(getattr(part, name), getattr(draws, name)[[4, 5, 6, 7, 0]])


@pytest.mark.slow
def test_a_run_in_parts_is_the_whole_one(trained):
    """Interrupted after 3 steps, in micro-batches within rounding of it, and its record holds numbers."""
    launch(trained, "name=parts", *KINDS, "train.steps=3")
    text = launch(trained, "name=parts", "train.steps=6")
    assert "goes on at step 3" in text and "auto" not in text
    assert same(trained / "results/whole", trained / "results/parts")
    launch(trained, "name=micro", *KINDS, "train.micro_batch_size=2")
    whole, micro = (logged(trained / "results" / name, "loss") for name in ("whole", "micro"))
    assert micro == pytest.approx(whole, rel=1e-4)
    config = read_json(trained / "results/whole/latest/info.json")["config"]
    assert (config["rf"]["train_shift"], config["rf"]["shift"]) == (0.125, 8.0)  # √(64/4096)
    assert "is finished" in launch(trained, "name=whole", "rf.train_shift=auto")
    with pytest.raises(SystemExit, match="rf.predicts: x there, noise here"):
        launch(trained, "name=whole", "rf.predicts=noise")


def test_doors_take_what_the_record_says(trained, composed):
    """Also as the weak network of another kind; weights that start another kind of run are warned of."""
    launch(trained, "name=plain")
    run = opened(trained / "results/whole")
    assert run.process == RF(predicts="x", train_shift=0.125, shift=8.0, contrastive=0.1)
    text = take_samples(trained, "checkpoint=results/whole", "classes=[3]", "seeds=0-1", "steps=2", *SPARSE)
    assert "2 steps and shift 8" in text and "sparse 1.5" in text
    weak = ("guidance=autoguidance", "guidance.scale=1.5", "guidance.checkpoint=results/plain")
    score(trained, "checkpoint=results/whole", "num_samples=4", "steps=2", *weak)
    written = read_json(trained / "results/whole/latest/fid.json")["settings"]
    assert written["rf"]["predicts"] == "x" and "predicts" not in written["weak_process"]
    cfg = settings.read(composed("objective=rf", *conftest.TINY))
    stored = StoredWeights("a file", "ema", {}, run.found)
    told = "rf.predicts was x where these weights were trained, but is velocity now"
    assert told in stored.warnings(cfg, run.latents)
    same_kind = settings.read(composed("objective=rf", "rf.predicts=x", "rf.clamp=0.2", *conftest.TINY))
    assert "rf.clamp was 0.05 where these weights" in "\n".join(stored.warnings(same_kind, run.latents))
    older = opened(trained / "results/plain").found
    del older.info["config"]["rf"]["predicts"]
    kind = settings.read(composed("objective=rf", "rf.predicts=noise", *conftest.TINY))
    stored = StoredWeights("a file", "ema", {}, older)
    assert "rf.predicts was velocity where these weights" in "\n".join(stored.warnings(kind, run.latents))


def test_auto_becomes_a_number_wherever_a_config_says_it(composed, read_config):
    folder = ("objective=rf", "rf.shift=auto", "dataset=folder", "dataset.path=somewhere")
    assert read_network(composed(*folder, "dataset.channels=32", "dataset.size=16")).rf.shift == pytest.approx(2**-0.5)
    assert read_config(*folder).rf.shift == "auto"  # until its data is opened
    with pytest.raises(ValueError, match="rf.contrastive contrasts with another sample of the batch, but train.batch"):
        read_config("objective=rf", "rf.contrastive=0.1", "train.batch_size=1")
