"""A draft head: trained from its model's states, and at work on a host."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stages.checkpoint.checkpoint import load_stage
from stages.checkpoint.draft_head import DRAFT_HEAD_NAME, DraftHead, add_draft_head, load_draft_head, write_draft_head
from stages.checkpoint.manifest import read_manifest
from stages.errors import CheckpointError
from stages.host.drafter import HeadDrafter
from stages.model.architecture import LlamaArchitecture
from tests.stages.model.tiny_llama import TINY, write_tiny
from trainer.blocks.data import Corpus
from trainer.distill.draft_head import HeadTask, _Acceptance, distill_head
from trainer.distill.settings import DistillSettings
from trainer.distill.teacher import Samples, Teacher

Short = Callable[..., DistillSettings]
HEAD = {"layers": None, "head": True, "guesses": 200}


@pytest.fixture
def checkpoint(pipeline: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pipeline, tmp_path / "model"))


def test_it_learns_and_the_checkpoint_gets_it(checkpoint: Path, text_file: Path) -> None:
    lines, before = list[str](), read_manifest(checkpoint)
    settings = DistillSettings(
        checkpoint=checkpoint,
        texts=(text_file,),
        steps=40,
        window=24,
        sequences=8,
        learning_rate=5e-3,
        bfloat16=False,
        **HEAD,
    )
    file = distill_head(settings, lines.append)
    after = read_manifest(checkpoint)
    assert file == checkpoint / DRAFT_HEAD_NAME
    assert after.digest() != before.digest(), "hosts with it and hosts without hold different weights"
    assert (after.parts, sorted(after.files)) == (before.parts, sorted([*before.files, DRAFT_HEAD_NAME]))
    head = load_draft_head(checkpoint, after)
    assert (len(head.tokens), len(head.stage.layers)) == (200, 4), "the first two layers and the last two"
    assert float(lines[-1].split("text_total_variation_1 ")[1].split(",")[0]) < 0.9


@pytest.fixture
def task(teacher: Teacher, tokens: Corpus, short: Short, tmp_path: Path) -> HeadTask:
    torch.manual_seed(3)
    samples = Samples(teacher, tokens, short(**HEAD), tmp_path / "samples", "x")
    task = HeadTask(samples, 200, (0, 2))
    with torch.no_grad():
        for parameter in task.head.join.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return task


def test_the_gradient_is_that_of_the_loss_as_written(task: HeadTask) -> None:
    """At acceptance 0 the cross-entropy alone, and far beyond 1 the logarithm of what is accepted alone."""
    generator = torch.Generator().manual_seed(0)
    states, seen = (torch.randn(60, TINY.width, generator=generator) for _ in range(2))
    for acceptance, is_cross in ((0.0, True), (30.0, False)):
        task.acceptance = acceptance
        ours, theirs = (states.clone().requires_grad_(True) for _ in range(2))
        p = task.probs(seen[None])[0]
        _Acceptance.apply(ours, task, p).backward()
        q = (theirs @ task.rows.T).softmax(-1)
        shared = torch.minimum(p, q).sum(-1)
        loss = -(p * q.log()).sum(-1).mean() if is_cross else -shared.log().mean()
        loss.backward()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-7)


def test_a_host_computes_what_was_trained(task: HeadTask, teacher: Teacher, pipeline: Path, tokens: Corpus) -> None:
    """The probs after one, two and three guesses in a row, though a host reads the text in pieces."""
    written = tokens.train[:20].long()
    hidden = written[None]
    for stage in teacher.stages:
        hidden = stage.read(hidden)
    seen = teacher.read(written[None])
    with torch.no_grad():
        expected = [(states @ task.rows.T)[0] for states in task._unrolled(written[None], seen, 3)]
    head_matrix = load_stage(pipeline, 2).head.weight.detach()  # type: ignore[union-attr]
    drafter = HeadDrafter(task.head.requires_grad_(False), head_matrix)
    state = drafter.begin(40, 0)
    known = written.numpy()
    drafter.read(state, 0, hidden[0, :1], known[:1])  # the token after the last is not known yet
    drafter.read(state, 1, hidden[0, 1:7], known[:7])
    drafter.read(state, 7, hidden[0, 7:12], known[:13])
    drafter.read(state, 10, hidden[0, 10:12], known[:13])  # a branch that is read once more
    assert state.caches[0].length == 12
    text = drafter.text_of(state)
    assert text is not None
    close = {"rtol": 0.05, "atol": 0.1}  # written are embedded in 16 bits here; products are of 8, or 7 without VNNI
    torch.testing.assert_close(text.logits_after(b"")[0], expected[0][11], **close)
    forks = text.fork(2, 5)
    ahead = [forks.read(torch.stack([written[at], written[at] * 0 + 1]).numpy())[0] for at in (13, 14)]
    torch.testing.assert_close(ahead[0], expected[1][11], **close)
    torch.testing.assert_close(ahead[1], expected[2][11], **close)


def test_heads_of_other_models_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    assert isinstance(TINY, LlamaArchitecture)
    other = DraftHead(TINY, 20)
    other.tokens.fill_(TINY.vocabulary + 5)
    write_draft_head(tmp_path / "vocabulary.safetensors", other)
    with pytest.raises(CheckpointError, match="another vocabulary"):
        add_draft_head(checkpoint, tmp_path / "vocabulary.safetensors")
    write_tiny(tmp_path / "wide", other_width := LlamaArchitecture(**{**vars(TINY), "width": 48}))
    write_draft_head(tmp_path / "wide.safetensors", DraftHead(other_width, 20))
    for name in ("wide.safetensors", "missing.safetensors"):
        with pytest.raises(CheckpointError):
            add_draft_head(checkpoint, tmp_path / name)
    (tmp_path / "nonsense.safetensors").write_bytes(b"nonsense" * 9)
    with pytest.raises(CheckpointError, match="no draft head"):
        add_draft_head(checkpoint, tmp_path / "nonsense.safetensors")
    assert DRAFT_HEAD_NAME not in read_manifest(checkpoint).files, "nothing was changed"
