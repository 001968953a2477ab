"""What a teacher reads and writes for its drafter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainer.blocks.data import Corpus
from trainer.distill.settings import DistillSettings
from trainer.distill.teacher import FIRST, ROWS, Samples, Teacher

Make = Callable[..., Samples]


@pytest.fixture
def samples(teacher: Teacher, tokens: Corpus, short: Callable[..., DistillSettings], tmp_path: Path) -> Make:
    return lambda **changes: Samples(teacher, tokens, short(**changes), tmp_path / "samples", str(changes))


def test_features_are_what_the_head_reads(samples: Make, teacher: Teacher) -> None:
    for written in (0, 1):
        tokens, features = samples(written=written, seed=written).sample(0)
        assert tokens.shape == (ROWS, 16)
        torch.testing.assert_close(features, teacher.read(tokens), rtol=1e-4, atol=1e-4)


def test_text_is_cut_from_the_users_and_what_is_written_begins_like_it(samples: Make, tokens: Corpus) -> None:
    whole = tokens.train.tolist()
    starts = {tuple(whole[i : i + 16]) for i in range(len(whole))}
    beginnings = {start[:8] for start in starts}
    read, written = (samples(written=share, seed=share).sample(0)[0].tolist() for share in (0, 1))
    assert all(tuple(row) in starts for row in read)
    assert all(tuple(row[:8]) in beginnings for row in written)
    assert not any(tuple(row) in starts for row in written)


def test_a_sample_that_is_lost_or_damaged_is_made_again(samples: Make, tmp_path: Path) -> None:
    first = samples()
    before = first.batch(0)
    for path, change in zip((tmp_path / "samples").iterdir(), (b"", b"nothing of the kind", None), strict=False):
        path.write_bytes(change) if change is not None else path.unlink()
    after = samples().batch(0)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


def test_each_is_read_so_often_on_average_and_old_ones_go(
    samples: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = samples(sequences=ROWS, passes=2)
    pool.kept = FIRST
    seen = list[int]()
    monkeypatch.setattr(pool, "row", lambda index, row: seen.append(index) or (torch.zeros(1), torch.zeros(1)))
    for step in range(20):
        begin = len(seen)
        pool.batch(step)
        newest = FIRST - 1 + step // 2
        assert {newest - FIRST < index <= newest for index in seen[begin:]} == {True}
    assert seen.count(8) == pytest.approx(2 * ROWS, rel=0.5)
    real = samples()
    real.kept = 1
    real.batch(0), real.batch(3 * ROWS)
    assert len(list((tmp_path / "samples").iterdir())) == 1
    real.drop()
    assert not (tmp_path / "samples").exists()


def test_the_teacher_writes_by_its_own_probs(teacher: Teacher, tokens: Corpus) -> None:
    prompt = tokens.valid_batch(1, 12)
    probs = teacher.head.logits(teacher.read(prompt)[:, -1]).softmax(-1)[0]
    text, _ = teacher.write(prompt.expand(1000, -1), 13, seed=1)
    found = torch.bincount(text[:, -1], minlength=300) / 1000
    assert float((found - probs).abs().sum()) / 2 < 0.25
    again, _ = teacher.write(prompt.expand(1000, -1), 13, seed=1)
    assert torch.equal(text, again)


def test_nothing_that_is_held_out_is_learned_from(samples: Make, tokens: Corpus) -> None:
    found = samples().held_out()
    whole = tokens.valid.tolist()
    text, written = (found[name][0] for name in ("text", "written"))
    assert all(row in [whole[i : i + 16] for i in range(len(whole))] for row in text.tolist())
    assert torch.equal(text[:, :2], written[:, :2])
    assert not torch.equal(text, written)
