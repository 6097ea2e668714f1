"""Whole runs of text networks on digits with captions: they go on, align, are sampled, exported and started from.

The references are the same run made another way, what the network is called with, and the dataset's own text."""

import shutil
from dataclasses import asdict, replace

import export_checkpoint
import numpy as np
import pytest
import torch
from conftest import CPU, launch, launch_door, opened, read_json, same, state, write_json
from torch.testing import assert_close

from tread.checkpoints import checkpoint
from tread.checkpoints.for_sampling import open_network, open_weak
from tread.checkpoints.network import build_network
from tread.checkpoints.weights import load_weights
from tread.data.captions import add_captions
from tread.data.columns import TextSpec
from tread.data.dataset import LatentDataset
from tread.data.section_writer import TextWriter
from tread.diffusion.guidance import Guidance
from tread.diffusion.sampling import Sampler, draw
from tread.evaluation.sample_files import facts_of
from tread.evaluation.similarity import noised_states, open_latents
from tread.models.conditions import Text
from tread.models.text_dit import TextEmbedder
from tread.preparing import digits
from tread.training import start
from tread.training.alignment import Aligned, Aligner, Alignment, build_projector
from tread.training.settings import complete
from tread.training.step import loss, step_draws

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
VOCABULARY = ("<begin>", "<unknown>", "digit", *NUMBERS)
WORDS = TextSpec("words", "of these words", 4, None, None, VOCABULARY)
FROZEN = TextSpec("frozen", "of these weights", 4, 6, 3)
ASKED = "Digits by those who wrote them"
OTHER = replace(FROZEN, encoder="other", fingerprint="of others", padding=True)


def encoded(spec: TextSpec, labels: np.ndarray) -> Text:
    """The captions of digits, of two tokens; the empty one of label −1 has the begin token alone."""
    labels = torch.from_numpy(labels)
    mask = torch.arange(4) <= (labels >= 0).long()[:, None]
    words = torch.stack([torch.zeros_like(labels), labels.clamp(min=0) + 3, *[torch.zeros_like(labels)] * 2], dim=1)
    if spec.width is None:
        return Text(words * mask, mask)
    table = torch.randn(len(VOCABULARY), 9, generator=torch.Generator().manual_seed(len(spec.encoder)))
    return Text(table[words * mask][..., :6] * mask[..., None], mask, table[words[:, 1] * mask[:, 1], 6:])


def write_text(folder, *specs: TextSpec) -> None:
    """Captions beside digits, and text of them."""
    labels = LatentDataset(folder).labels
    add_captions(folder, [[f"digit {NUMBERS[label]}"] for label in labels])
    for spec in specs:
        writer = TextWriter(folder, spec, [1] * len(labels))
        writer.begin()
        writer.write(0, [encoded(spec, labels)])
        writer.write(1, [encoded(spec, np.array([-1]))])
        writer.publish()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with digits and their text, and a run of 6 steps of each encoder."""
    folder = tmp_path_factory.mktemp("text")
    for part in ("train", "heldout"):
        digits.prepare_digits(folder / "data/digits" / part, part)
        write_text(folder / "data/digits" / part, WORDS, FROZEN, OTHER)
        index = folder / "data/digits" / part / "index.json"
        write_json(index, {**read_json(index), "attribution": ASKED})
    for encoder in ("words", "frozen"):
        launch(folder, "model=tread_text", f"text.encoder={encoder}", f"name={encoder}")
    return folder


def trained(folder, run="words", weights="ema"):
    return open_network(checkpoint.find(folder / "results" / run), weights)


@pytest.mark.parametrize("spec", [WORDS, FROZEN], ids=lambda spec: spec.encoder)
def test_a_run_knows_its_encoder_and_keeps_the_empty_caption(folder, spec):
    actual = trained(folder, spec.encoder)
    assert asdict(actual.cfg.text) == asdict(spec)
    network = actual.load(CPU).network
    null = LatentDataset(folder / "data/digits/train", text=spec.encoder).encoded.null
    for held, given in zip(network.null(2), null):
        assert held is given is None or torch.equal(held, given.to(held.dtype).expand_as(held))
    assert "embedding_table" not in "".join(network.state_dict())
    assert (folder / "results" / spec.encoder / "samples/step_0000006.png").exists()


def test_a_start_asks_for_faults_of_attention_over_its_words(folder, monkeypatch):
    monkeypatch.setattr(start, "avoid_faults", lambda device, keys: f"warning: {device} and {keys} keys")
    for model, keys in (("model=dit_text text.encoder=words", WORDS.tokens), ("model=dit", None)):
        said = launch(folder, *model.split(), "train.steps=1", f"name=faulty-{keys}")
        assert f"warning: cpu and {keys} keys" in said


def test_it_goes_on_bit_equal_also_in_micro_batches_and_recomputed(folder):
    words, results = ("model=tread_text", "text.encoder=words"), folder / "results"
    shutil.copytree(results / "words/step_0000003", results / "parts/step_0000003")
    text = launch(folder, *words, "name=parts", "train.activation_checkpointing=true")
    assert "goes on at step 3" in text and "settings stay" not in text  # what the dataset filled in was not typed
    assert "network   dit_text, " in text and "r(2→2) keeps 8 of 16 tokens" in text
    assert same(results / "words", results / "parts")
    launch(folder, *words, "name=micro", "train.micro_batch_size=2")
    whole, micro = state(results / "words"), state(results / "micro")
    for key in whole:
        assert_close(micro[key], whole[key], rtol=1e-2, atol=1e-4)


def test_an_encoders_facts_come_from_the_dataset(folder, composed):
    """And are the same where a run's own record states them again."""
    config = composed("model=dit_text", "text.encoder=other", f"dataset.path={folder}/data/digits/train")
    _, completed = complete(config)
    assert completed["text"] == asdict(OTHER) and complete(completed)[1] == completed


def test_lightning_and_alignment_with_itself(folder):
    options = ("text.encoder=frozen", "alignment=self", "objective=rf", "train.steps=1")
    text = launch(folder, "model=tread_lightning_text", *options)
    assert "network   lightning_text" in text and "alignment self" in text
    assert trained(folder, "digits-tread_lightning_text-rf-self").load(CPU).network.head_dim == 8


def test_label_drop_makes_captions_the_empty_one(folder, composed, monkeypatch):
    """Exactly the samples whose number lies below train.label_drop, as the network is called; reference: the
    dataset's own empty caption."""
    options = ("model=tread_text", "text.encoder=frozen", "train.label_drop=0.4", "train.batch_size=16")
    cfg, _ = complete(composed(*options, f"dataset.path={folder}/data/digits/train"))
    data = LatentDataset(cfg.dataset.path, text="frozen")
    torch.manual_seed(0)
    network, seen = build_network(cfg), []
    network.take_null(data.encoded.null)
    batch, draws = data.batch(0, 3, 16), step_draws(cfg, data.latents, 3, "cpu")
    monkeypatch.setattr(TextEmbedder, "check", lambda _, y, size: seen.append(y))
    module = Aligned(network, build_projector(Alignment(kind="self"), network.hidden_size, network.hidden_size), (1,))
    aligner = Aligner(Alignment(kind="self"), module, teacher=network)
    drawn = draws._replace(back=torch.zeros(16))
    sum(loss(cfg, module, data.latents, batch, drawn, network.null(1), aligner)).mean().backward()
    gone = draws.drop < 0.4
    assert 0 < gone.sum() < 16 and len(seen) == 2
    for y in seen:
        for actual, kept, null in zip(y, batch.text, data.encoded.null):
            assert all(torch.equal(actual[row], null[0] if gone[row] else kept[row]) for row in range(16))


def test_evaluation_and_similarity_see_the_captions(folder, monkeypatch):
    """The first caption of each sample, never the null one."""
    actual, seen = trained(folder), []
    monkeypatch.chdir(folder)
    data = open_latents(actual)
    monkeypatch.setattr(TextEmbedder, "check", lambda _, y, size: seen.append(y))
    list(noised_states(actual.load(CPU), data, 5, 2, 0, 5))
    chosen = np.arange(5) * len(data) // 5
    assert torch.equal(seen[0].tokens, encoded(WORDS, data.labels[chosen]).tokens)


def test_it_is_exported_in_half_precision_and_started_from(folder):
    exports = folder / "exports"
    words = ["checkpoint=results/words", f"out={exports}", "dtype=fp16"]
    assert f"its samples: {ASKED}" in launch_door(export_checkpoint.main, "export_checkpoint", folder, *words)
    cfg = trained(folder).cfg
    network, whole = build_network(cfg), trained(folder).load(CPU).network
    load_weights(network, str(exports), model=cfg.model, text=cfg.text)
    for (name, value), other in zip(network.state_dict().items(), whole.state_dict().values()):
        assert value.dtype == other.dtype
        assert_close(value, other, rtol=1e-3, atol=1e-4, msg=name)
    assert opened(exports).cfg.text == cfg.text
    text = launch(folder, "model=dit_text", "text.encoder=words", f"init_from={exports}", "train.steps=1", "name=from")
    assert "averaged (ema)" in text


def test_what_the_data_ask_to_be_named_goes_with_weights_and_pictures(folder):
    """From index.json's `attribution` to the checkpoint, and from there to what samples say of themselves."""
    saved = trained(folder)
    sampler = Sampler.of(saved.process, None, None, 1, "fp32")
    assert saved.found.info["attribution"] == facts_of({}, sampler, saved, None)["attribution"] == ASKED
    del saved.found.info["attribution"]  # as in a checkpoint of a run whose data ask for nothing
    assert "attribution" not in facts_of({}, sampler, saved, None)


@pytest.mark.parametrize(
    "overrides, shown",
    [
        (["model=dit_text", "text.encoder=other", "init_from=results/frozen"], "text.encoder frozen instead of other"),
        (["model=dit_text", "text.encoder=words", "init_from=results/frozen"], "missing: y_embedder.words.weight"),
        (["model=dit", "init_from=results/words"], "the file is of architecture dit_text"),
        (["model=tread_text"], "text.encoder is null, but model=tread_text takes texts: scripts/prepare_text.py"),
        (["model=dit_text", "text.encoder=nobody"], "has no text of encoder nobody, but of words, frozen, other"),
        (["model=dit_text", "text.encoder=words", "text.tokens=77"], "text.tokens is 77, .*, but 4 in data"),
        (["model=dit_text", "text.encoder=words", "eval.fid_every=1", "eval.fid_reference=x"], "fid_every scores"),
        (["model=dit_text", "text.encoder=words", "train.path_drop=0.1"], "model=dit_text has no sparse path"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(folder, overrides, shown):
    with pytest.raises(SystemExit, match=shown):
        launch(folder, *overrides, "name=refused")
    assert not (folder / "results/refused").exists()


def test_another_encoder_is_another_run_or_other_heldout_data(folder, tmp_path):
    with pytest.raises(SystemExit, match="text.fingerprint is of these weights, as .* run was begun, but of others in"):
        launch(folder, "model=tread_text", "text.encoder=other", "name=frozen", "train.steps=9")
    with pytest.raises(SystemExit, match="digits/heldout and data/digits/train differ in text.fingerprint"):
        shutil.copytree(folder / "data", tmp_path / "data")
        write_text(tmp_path / "data/digits/heldout", replace(WORDS, fingerprint="of other words"))
        launch(tmp_path, "model=dit_text", "text.encoder=words")


def test_guidance_by_another_run_takes_the_same_text(folder):
    """Autoguidance by an earlier checkpoint is drawn; by a network of another encoder it is refused."""
    launch(folder, "model=dit_text", "text.encoder=words", "name=weak", "train.steps=1")
    strong = trained(folder)
    guidance = Guidance("autoguidance", 2.0, checkpoint=str(folder / "results/weak"))
    weak = open_weak(guidance, strong)
    models = [this.load(CPU, guidance) for this in (strong, weak)]
    prompts = encoded(WORDS, np.array([3, 5]))
    sampler = Sampler(2, 2, guidance=guidance)
    [actual] = draw(replace(models[0], prompts=prompts), [1, 2], torch.tensor([1, 0]), sampler, models[1])
    assert actual.isfinite().all()
    guidance = replace(guidance, checkpoint=str(folder / "results/frozen"))
    with pytest.raises(ValueError, match="differ in text, so their predictions can't be combined"):
        open_weak(guidance, strong)
