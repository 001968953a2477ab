from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stages.errors import ResumeError
from trainer.rounds.worker_state import Pending, PieceStanding, Standing, load_worker, save_worker


def test_a_state_comes_back_whole(tmp_path: Path) -> None:
    pending = Pending("r4-x", 4, 3, 2, 8, {"denoise_nats": 2.5}, b"payload" * 9)
    piece = PieceStanding(finished=4, round=5, base_version=4, steps=1, held_version=4, own_in=5)
    standing = Standing("block-1", turn=1, steps=1, pieces=[PieceStanding(over=True), piece])
    groups = {"module": {"a.weight": torch.randn(3, 2), "b": torch.randn(())}, "own": {"b": torch.ones(2)}}
    for pending_ in (pending, None):
        piece.pending = pending_
        save_worker(tmp_path / "s", "run", standing, groups)
        run, found, tensors = load_worker(tmp_path / "s")
        assert (run, found) == ("run", standing)
        assert tensors.keys() == groups.keys()
        for name, named in groups.items():
            assert all(torch.equal(tensors[name][key], tensor) for key, tensor in named.items())


@pytest.mark.parametrize("where", [-1, 60, 20])
def test_a_damaged_state_is_told(tmp_path: Path, where: int) -> None:
    path = tmp_path / "s"
    save_worker(path, "run", Standing("block-0"), {"module": {"a": torch.randn(8)}})
    raw = bytearray(path.read_bytes())
    raw[where] ^= 0x55
    path.write_bytes(raw)
    with pytest.raises(ResumeError, match="is damaged"):
        load_worker(path)


def test_half_a_state_is_told(tmp_path: Path) -> None:
    path = tmp_path / "s"
    save_worker(path, "run", Standing("block-0"), {"module": {"a": torch.randn(8)}})
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ResumeError, match="delete it to begin anew"):
        load_worker(path)
