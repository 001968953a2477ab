"""Stages trained apart: what reaches them, what does not, and what end-to-end training would have given them."""

from dataclasses import replace
from pathlib import Path

import torch

from stages.checkpoint.checkpoint import load_ar
from stages.model.pipeline import ArModel
from tests.trainer.small import corpus, tiny
from trainer.blocks.config import LookaheadConfig
from trainer.blocks.losses import next_byte_loss
from trainer.blocks.run import Run, train_step
from trainer.blocks.task import ScorerTask, StagesInOneProcess
from trainer.blocks.train import train_scorer

three = replace(tiny.architecture, parts=3, layers=1)


def text(length: int = 33) -> torch.Tensor:
    return torch.randint(256, (2, length), generator=torch.Generator().manual_seed(1))


def gradients(workers: StagesInOneProcess, index: int) -> list[torch.Tensor]:
    return [p.grad.clone() for p in workers.stages[index].parameters() if p.grad is not None]


def test_only_fresh_copies_give_the_gradient_of_end_to_end_training() -> None:
    workers = StagesInOneProcess(three)
    workers.refresh()
    sum(workers.losses(text())).backward()
    whole = ArModel(three)
    whole.load_state_dict({k: v for k, v in workers.state_dict().items() if k.startswith("stages.")})
    next_byte_loss(whole(text()[:, :-1]), text()).backward()
    for ours, theirs in zip(workers.stages, whole.stages, strict=True):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)
    fresh = gradients(workers, 0)
    workers.zero_grad()
    for parameter in workers.stages[2].parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    sum(workers.losses(text())).backward()
    assert all(torch.equal(a, b) for a, b in zip(fresh, gradients(workers, 0), strict=True))  # it cannot know yet
    workers.zero_grad()
    workers.refresh()
    sum(workers.losses(text())).backward()
    assert not torch.allclose(fresh[0], gradients(workers, 0)[0])


def test_a_scorer_is_served_like_an_ar_model(tmp_path: Path) -> None:
    manifest = train_scorer(tiny, corpus, tmp_path)
    assert manifest.kind == "ar"
    assert manifest.complete
    assert manifest.training["objective"] == "block by block"
    assert manifest.training["lookahead"]["refresh_every"] == 10
    model = load_ar(tmp_path)
    assert model(text()[:, :-1]).shape == (2, 32, 256)
    assert train_scorer(tiny, corpus, tmp_path) == manifest


def test_a_resumed_scorer_has_the_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    config = replace(tiny, steps=7, lookahead=LookaheadConfig(refresh_every=4))

    def task() -> ScorerTask:
        torch.manual_seed(0)
        return ScorerTask(StagesInOneProcess(config.architecture), corpus, config)

    whole = task()
    Run(whole, config, tmp_path / "whole", "run").train()
    stopped = Run(task(), config, tmp_path / "stopped", "run")
    for _ in range(6):  # copies are of step 4 then
        train_step(stopped.task, stopped.optimizers, config, stopped.step)
        stopped.step += 1
    stopped._save()
    resumed = task()
    Run(resumed, config, tmp_path / "stopped", "run").train()
    for ours, theirs in zip(whole.module.parameters(), resumed.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)
