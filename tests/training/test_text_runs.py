"""Whole runs of text networks on digits with captions: they go on, align, are sampled, exported and started from.

The references are the same run made another way, what the network is called with, and the dataset's own text."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import export_checkpoint
import numpy as np
import pytest
import torch
from conftest import launch, launch_door, state

from tread.checkpoints import checkpoint
from tread.checkpoints.for_sampling import open_network, open_weak
from tread.checkpoints.network import TextSettings, build_network
from tread.checkpoints.weights import load_weights, sizes
from tread.data.captions import add_captions
from tread.data.columns import TextSpec
from tread.data.dataset import LatentDataset
from tread.data.section_writer import TextWriter
from tread.diffusion.guidance import Guidance
from tread.diffusion.sampling import Sampler, draw
from tread.evaluation.sample_files import facts_of
from tread.evaluation.similarity import noised_states, open_latents
from tread.models import conditions
from tread.models.architectures import DiTOptions
from tread.models.conditions import Text
from tread.models.text_dit import TextDiT
from tread.preparing import digits
from tread.training import settings
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
        digits.prepare_digits(folder / "data" / "digits" / part, part)
        write_text(folder / "data" / "digits" / part, WORDS, FROZEN, OTHER)
        index = folder / "data" / "digits" / part / "index.json"
        index.write_text(json.dumps({**json.loads(index.read_text()), "attribution": ASKED}))
    for encoder in ("words", "frozen"):
        launch(folder, "model=tread_text", f"text.encoder={encoder}", f"name={encoder}")
    return folder


def trained(folder, run="words", weights="ema"):
    return open_network(checkpoint.find(folder / "results" / run), weights)


@pytest.mark.parametrize("spec", [WORDS, FROZEN], ids=lambda spec: spec.encoder)
def test_a_run_knows_its_encoder_and_keeps_the_empty_caption(folder, spec):
    found = trained(folder, spec.encoder)
    assert asdict(found.cfg.text) == asdict(spec)
    network = found.load(torch.device("cpu")).network
    null = LatentDataset(folder / "data" / "digits" / "train", text=spec.encoder).null_text()
    for held, given in zip(network.null(2), null):
        assert held is given is None or torch.equal(held, given.to(held.dtype).expand_as(held))
    assert "embedding_table" not in "".join(network.state_dict())
    assert (folder / "results" / spec.encoder / "samples" / "step_0000006.png").exists()


def test_it_goes_on_bit_equal_also_in_micro_batches_and_recomputed(folder):
    words = ("model=tread_text", "text.encoder=words")
    launch(folder, *words, "name=parts", "train.steps=3")
    text = launch(folder, *words, "name=parts", "train.activation_checkpointing=true")
    assert "goes on at step 3" in text
    assert "network   dit_text, " in text and "r(2→2) keeps 8 of 16 tokens" in text
    whole, parts = state(folder / "results" / "words"), state(folder / "results" / "parts")
    assert whole.keys() == parts.keys() and all(torch.equal(whole[key], parts[key]) for key in whole)
    launch(folder, *words, "name=micro", "train.micro_batch_size=2")
    micro = state(folder / "results" / "micro")
    for key in whole:
        torch.testing.assert_close(micro[key], whole[key], rtol=1e-2, atol=1e-4)


def test_another_encoder_is_another_run(folder):
    with pytest.raises(SystemExit, match="text.fingerprint is of these weights, as .* run was begun, but of others of"):
        launch(folder, "model=tread_text", "text.encoder=other", "name=frozen", "train.steps=9")


def test_what_is_to_know_of_an_encoder_comes_from_the_dataset(folder, composed):
    """And is the same where a run's own record says it again."""
    config = composed("model=dit_text", "text.encoder=other", f"dataset.path={folder}/data/digits/train")
    _, found = complete(config)
    assert found["text"] == asdict(OTHER) and complete(found)[1] == found


def test_lightning_and_alignment_with_itself(folder):
    text = launch(folder, "model=tread_lightning_text", "text.encoder=frozen", "alignment=self", "objective=rf")
    assert "network   lightning_text" in text and "alignment self" in text
    found = trained(folder, "digits-tread_lightning_text-rf-self")
    assert found.load(torch.device("cpu")).network.head_dim == 8


def test_label_drop_makes_captions_the_empty_one(folder, composed, monkeypatch):
    """Of a step's batch just those whose number lies below train.label_drop, as the network is called; of labels the
    same rows become the null class. Reference: the dataset's own empty caption."""
    _, config = complete(
        composed(
            "model=tread_text",
            "text.encoder=frozen",
            f"dataset.path={folder}/data/digits/train",
            "train.label_drop=0.4",
            "train.batch_size=16",
        )
    )
    cfg = settings.read(config)
    data = LatentDataset(cfg.dataset.path, text="frozen")
    torch.manual_seed(0)
    network, seen = build_network(cfg), []
    network.take_null(data.null_text())
    batch, draws = data.batch(0, 3, 16), step_draws(cfg, data.latents, 3, "cpu")
    monkeypatch.setattr(TextDiT, "check_condition", lambda _, y, size: seen.append(y))
    module = Aligned(network, build_projector(Alignment(kind="self"), network.hidden_size, network.hidden_size), 1)
    aligner = Aligner(Alignment(kind="self"), module, teacher=network)
    drawn = replace(draws, back=torch.zeros(16))
    sum(loss(cfg, module, data.latents, batch, drawn, network.null(1), aligner)).mean().backward()
    gone = draws.drop < 0.4
    assert 0 < gone.sum() < 16 and len(seen) == 2
    for y in seen:
        for found, kept, null in zip(y, batch.text, data.null_text()):
            assert all(torch.equal(found[row], null[0] if gone[row] else kept[row]) for row in range(16))
    labelled = replace(cfg, model=DiTOptions(**asdict(cfg.model) | {"architecture": "dit", "routes": cfg.model.routes}))
    called = []

    def asked(x, t, y, routes=(), record=None):
        called.append(y)
        return x

    loss(labelled, asked, data.latents, batch._replace(text=None), draws, torch.tensor([10]))
    assert torch.equal(called[0], batch.labels.masked_fill(gone, 10))


def test_evaluation_and_similarity_see_the_captions(folder, monkeypatch):
    """The first caption of each sample, never the null one."""
    found, seen = trained(folder), []
    monkeypatch.chdir(folder)
    data = open_latents(found)
    monkeypatch.setattr(TextDiT, "check_condition", lambda _, y, size: seen.append(y))
    list(noised_states(found.load(torch.device("cpu")), data, 5, 2, 0, 5))
    chosen = np.arange(5) * len(data) // 5
    assert torch.equal(seen[0].tokens, encoded(WORDS, data.labels[chosen]).tokens)


def test_it_is_exported_in_half_precision_and_started_from(folder):
    exports = folder / "exports"
    words = ["checkpoint=results/words", f"out={exports}", "dtype=fp16"]
    assert f"its samples: {ASKED}" in launch_door(export_checkpoint.main, "export_checkpoint", folder, *words)
    cfg = trained(folder).cfg
    network, whole = build_network(cfg), trained(folder).load(torch.device("cpu")).network
    load_weights(network, str(exports), model=cfg.model, text=cfg.text)
    for (name, value), other in zip(network.state_dict().items(), whole.state_dict().values()):
        assert value.dtype == other.dtype
        torch.testing.assert_close(value, other, rtol=1e-3, atol=1e-4, msg=name)
    assert open_network(checkpoint.find(exports), "ema").cfg.text == cfg.text
    text = launch(folder, "model=dit_text", "text.encoder=words", f"init_from={exports}", "train.steps=1", "name=from")
    assert "averaged (ema)" in text


def test_what_the_data_ask_to_be_named_goes_with_weights_and_pictures(folder):
    """From index.json's `attribution` to the checkpoint, and from there to what samples say of themselves."""
    found = trained(folder)
    assert found.found.info["attribution"] == ASKED
    facts = facts_of({}, Sampler.of(found.process, None, None, 1, "fp32"), found, None)
    assert facts["attribution"] == ASKED
    del found.found.info["attribution"]  # as in a checkpoint of a run whose data ask for nothing
    assert "attribution" not in facts_of({}, Sampler.of(found.process, None, None, 1, "fp32"), found, None)


def test_weights_for_another_encoder_are_refused(folder):
    """Of equal shapes, by their record; of others, by these. And a class network's."""
    for overrides, shown in (
        (["model=dit_text", "text.encoder=other", "init_from=results/frozen"], "text.encoder frozen instead of other"),
        (["model=dit_text", "text.encoder=words", "init_from=results/frozen"], "missing: y_embedder.words.weight"),
        (["model=dit", "init_from=results/words"], "the file is of architecture dit_text"),
    ):
        with pytest.raises(SystemExit, match=shown):
            launch(folder, *overrides, "name=refused")
    assert sizes(trained(folder).found.tensors("ema"))["model.architecture"] == "dit_text"


def test_guidance_by_another_run_takes_the_same_text(folder):
    """Autoguidance by an earlier checkpoint is drawn; by a network of another encoder it is refused."""
    launch(folder, "model=dit_text", "text.encoder=words", "name=weak", "train.steps=1")
    strong = trained(folder)
    guidance = Guidance("autoguidance", 2.0, checkpoint=str(folder / "results" / "weak"))
    weak = open_weak(guidance, strong)
    models = [one.load(torch.device("cpu"), guidance) for one in (strong, weak)]
    prompts = encoded(WORDS, np.array([3, 5]))
    sampler = Sampler(2, 2, guidance=guidance)
    [found] = draw(replace(models[0], prompts=prompts), [1, 2], torch.tensor([1, 0]), sampler, models[1])
    assert found.isfinite().all()
    guidance = replace(guidance, checkpoint=str(folder / "results" / "frozen"))
    with pytest.raises(ValueError, match="differ in text, so that their predictions can't be combined"):
        open_weak(guidance, strong)


def test_one_caption_is_learnt_from_the_other(folder, composed):
    """A step of training on made-up captions lowers the loss of the same step, by weights of the text too."""
    cfg, _ = complete(composed("model=dit_text", "text.encoder=words", f"dataset.path={folder}/data/digits/train"))
    data, network = (
        LatentDataset(cfg.dataset.path, text="words"),
        build_network(replace(cfg, model=replace(cfg.model, init="xavier"))),
    )
    network.take_null(data.null_text())
    batch, draws = data.batch(0, 0, cfg.train.batch_size), step_draws(cfg, data.latents, 0, "cpu")

    def mean_loss():
        return loss(cfg, network, data.latents, batch, draws, network.null(1))[0].mean()

    before = mean_loss()
    before.backward()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-5)
    optimizer.step()
    assert network.blocks[0].cross_attn.proj.weight.any() and network.y_embedder.pooled_proj.weight.any()
    assert mean_loss() < before
    assert not torch.equal(
        network(batch.stored.float(), draws.level, batch.text),
        network(
            batch.stored.float(), draws.level, conditions.rows(batch.text, torch.arange(cfg.train.batch_size).flip(0))
        ),
    )


@pytest.mark.parametrize(
    ("overrides", "shown"),
    [
        (["model=tread_text"], "text.encoder is null, but model=tread_text takes texts: text.encoder=… names"),
        (["model=dit_text", "text.encoder=nobody"], "has no text of encoder nobody, but of words, frozen, other"),
        (
            ["model=dit_text", "text.encoder=words", "text.tokens=77"],
            "text.tokens is 77, as typed or .*, but 4 of the text of words in data",
        ),
        (["model=dit_text", "text.encoder=words", "model.norm=rms"], "model.norm is 'rms', but dit_text has no such"),
        (["model=dit_text", "text.encoder=words", "eval.fid_every=1", "eval.fid_reference=x"], "FID in training is of"),
        (["model=dit_text", "text.encoder=words", "train.path_drop=0.1"], "model=dit_text has no sparse path"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(folder, overrides, shown):
    with pytest.raises(SystemExit, match=shown):
        launch(folder, *overrides, "name=refused")
    assert not (folder / "results" / "refused").exists()


def test_a_dataset_without_captions_is_refused_and_labels_need_none(tmp_path):
    with pytest.raises(SystemExit, match="has no text of encoder words"):
        launch(tmp_path, "model=tread_text", "text.encoder=words")
    launch(tmp_path, "model=dit", "text.encoder=words", "train.steps=1")
    info = json.loads((tmp_path / "results" / "digits-dit" / "latest" / "info.json").read_text())
    assert info["config"]["text"] == asdict(TextSettings("words"))


def test_heldout_text_of_another_encoder_is_refused(folder, tmp_path):
    for part in ("train", "heldout"):
        digits.prepare_digits(tmp_path / "data" / "digits" / part, part)
        spec = WORDS if part == "train" else replace(WORDS, fingerprint="of other words")
        write_text(tmp_path / "data" / "digits" / part, spec)
    same = "encode both by the same .they differ in fingerprint."
    with pytest.raises(SystemExit, match=f"hold text of other encoders named words: {same}"):
        launch(tmp_path, "model=dit_text", "text.encoder=words")
