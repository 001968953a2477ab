import math

import pytest
import torch

from onesweep.trainer.blocks.data import Corpus
from onesweep.trainer.grafting.measure import Writing, distinct_pairs, panel
from onesweep.trainer.grafting.model import GraftModel


def test_pairs_are_counted_once() -> None:
    assert distinct_pairs([1, 2, 3, 4]) == 1
    assert distinct_pairs([1, 1, 1, 1, 1]) == 0.25
    assert distinct_pairs([1]) == 1


def test_the_judges_own_text_is_likelier_to_it_than_another(model: GraftModel) -> None:
    generator = torch.Generator().manual_seed(0)
    train, valid = torch.randint(200, (2, 400), generator=generator, dtype=torch.int32)
    judge = model.stages
    judge[-1].head.weight.mul_(8)  # a model that is sure of what it says
    writing = Writing(prompts=3, prompt_symbols=4, symbols=8, steps=1, chunks=(3, 8))
    author, own, *chain = panel(model, judge, Corpus("numbers", train, valid), writing)
    assert own.judge_nats < author.judge_nats
    assert [row.sweeps for row in (author, own, *chain)] == [0, 8, 3, 1]
    assert all(len(text) == 8 for row in chain for text in row.texts)
    assert all(math.isfinite(row.judge_nats) for row in chain)
    again = panel(model, judge, Corpus("numbers", train, valid), writing)
    assert again[1].texts == own.texts
    assert again[0].judge_nats == pytest.approx(author.judge_nats)
