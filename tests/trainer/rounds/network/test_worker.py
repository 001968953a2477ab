"""Workers that are stopped, that get no answer, or whose disk is full; and their state."""

import asyncio
import errno
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.errors import CheckpointError, Interrupted, ResumeError
from tests.conftest import PATIENCE_S, until
from trainer.blocks import state
from trainer.rounds.worker_state import STATE_NAME, WorkerProgress, load_worker, save_worker

Start = Callable[..., Any]


@pytest.mark.parametrize("call", ["judge", "read", "join"])
def test_a_stopped_worker_does_not_wait_for_a_frozen_coordinator(
    network: Start, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    net = network(replicas=1, rounds=2, model="ar")
    called, real = list[str](), getattr(net.coordinator, call)

    async def frozen(*args: Any) -> Any:
        called.append(call)
        await asyncio.Event().wait()

    monkeypatch.setattr(net.coordinator, call, frozen)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(net.work, "w0")
        until(lambda: called)
        net.stop.set()
        with pytest.raises(Interrupted, match="run again to resume"):
            job.result(PATIENCE_S)
    until(lambda: not any(thread.name == "stop" for thread in threading.enumerate()))  # its calls are cancelled
    monkeypatch.setattr(net.coordinator, call, real)
    if call == "judge":
        _, standing, _ = load_worker(net.out.parent / "state-w0" / STATE_NAME)
        assert standing.pending is not None, "the training is not lost"
    net.stop.clear()
    net.work("w0")
    net.check_weights()
    net.check_audit(2)


def test_a_worker_with_a_full_disk_keeps_its_last_state(network: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    net, real, saved = network(replicas=1, rounds=3, model="ar"), state.save_file, list[int]()

    def full(*args: Any) -> None:
        saved.append(1)
        if len(saved) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*args)

    monkeypatch.setattr(state, "save_file", full)
    with pytest.raises(CheckpointError, match=r"No space left on device; the previous file is untouched"):
        net.work("w0")
    _, standing, _ = load_worker(net.out.parent / "state-w0" / STATE_NAME)
    assert standing.finished == 0
    net.work("w0")
    until(lambda: net.coordinator.schedule.ended)
    net.check_audit(3)


def test_a_saved_state_is_loaded_whole(tmp_path: Path) -> None:
    pending = {"id": "r4-x", "round": 4, "base_version": 3, "steps": 2, "losses": {"denoise_nats": 2.5}}
    standing = WorkerProgress("block-1", finished=4, round=5, base_version=4, steps=1, held_version=4)
    groups = {"module": {"a.weight": torch.randn(3, 2), "b": torch.randn(())}, "own": {"b": torch.ones(2)}}
    for pending_ in (pending, None):
        standing.pending = pending_
        save_worker(tmp_path / "s", "run", standing, groups)
        run, found, tensors = load_worker(tmp_path / "s")
        assert (run, found) == ("run", standing)
        assert tensors.keys() == groups.keys()
        for name, named in groups.items():
            assert all(torch.equal(tensors[name][key], tensor) for key, tensor in named.items())


def test_a_state_of_an_older_version_is_refused(tmp_path: Path) -> None:
    state.save_state(tmp_path / "s", {"run": "r", "part": "block-1", "fragments": []}, {})
    with pytest.raises(ResumeError, match="has format 1, but this version reads 2; delete it to start over"):
        load_worker(tmp_path / "s")
