"""Real processes that are killed, and go on: nothing is lost, nothing counts twice, and the weights are the same."""

import contextlib
import shutil
import signal
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from stages.checkpoint.checkpoint import load_chain
from stages.checkpoint.manifest import read_manifest
from tests.conftest import until
from tests.trainer.processes import ended, launched
from tests.trainer.small import events_of
from trainer.blocks.config import load_config
from trainer.blocks.data import load_corpus
from trainer.rounds.simulation import SimulatedWorkers, Simulation
from trainer.rounds.spec import RunSpec
from trainer.rounds.store import audit

ROUNDS, WORKERS = 6, 2
SETTINGS = f"""
[rounds]
rounds = {ROUNDS}
steps_per_round = 3
deadline_s = 0
"""
WITHIN_S = 200.0


@pytest.fixture
def config_file(settings: Callable[..., Path], tmp_path: Path) -> Path:
    """One block, which two workers train: each round is merged from both."""
    path = tmp_path / "run.toml"
    plain = settings().read_text().replace("[noise]", "bfloat16 = false\n[noise]")
    path.write_text(plain.replace("parts = 2", "parts = 1") + SETTINGS)
    return path


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., BaseProcess]]:
    """`start(name, *arguments)`: a command as a process, whose words go into a file."""
    with contextlib.ExitStack() as stack:

        def launch(name: str, *arguments: object) -> BaseProcess:
            process = launched(tmp_path / f"{name}.log", *arguments)
            stack.callback(process.join)
            stack.callback(process.kill)
            return process

        yield launch


def accepted(out: Path) -> int:
    return sum(event["kind"] == "accepted" for event in events_of(out / "rounds"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_processes_do_not_change_the_weights(
    start: Callable[..., BaseProcess], config_file: Path, text_file: Path, tmp_path: Path, unused_port: int
) -> None:
    out, address = tmp_path / "out", f"127.0.0.1:{unused_port}"

    def coordinator() -> BaseProcess:
        how = ("--config", config_file, "--data", text_file, "--out", out, "--publish-every", 2, "--lease", 600)
        return start("coordinator", "train", "coordinate", *how, "--listen", address)

    def worker(number: int) -> BaseProcess:
        how = ("--data", text_file, "--state", tmp_path / f"w{number}", "--save-every", 0, "--patience", WITHIN_S)
        return start(f"w{number}", "train", "work", "--coordinator", address, "--name", f"w{number}", *how)

    first, workers = coordinator(), [worker(number) for number in range(WORKERS)]
    until(lambda: accepted(out) >= 3, WITHIN_S)
    first.kill()
    assert ended(first, WITHIN_S) == -signal.SIGKILL
    seen = accepted(out)
    second = coordinator()
    until(lambda: accepted(out) >= min(seen + 2, WORKERS * ROUNDS - 2), WITHIN_S)
    workers[0].kill()
    assert ended(workers[0], WITHIN_S) == -signal.SIGKILL
    workers[0] = worker(0)

    assert ended(second, WITHIN_S) == 0, (tmp_path / "coordinator.log").read_text()
    assert [ended(process, WITHIN_S) for process in workers[1:]] == [0]
    found = audit(out / "rounds")
    assert (found.problems, found.accepted, found.merged, found.pending) == ([], WORKERS * ROUNDS, WORKERS * ROUNDS, 0)

    assert "chain" in read_manifest(out).metrics
    corpus = load_corpus(text_file)
    spec = RunSpec.of(load_config(config_file), corpus)
    engine = Simulation(spec, corpus, SimulatedWorkers())
    engine.run()
    for block, (_, expected) in zip(load_chain(out), engine.published().items(), strict=True):
        for name, tensor in block.named_parameters():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("older", [True, False])
def test_workers_exit_if_the_directory_was_replaced_or_is_older(
    start: Callable[..., BaseProcess], config_file: Path, text_file: Path, tmp_path: Path, unused_port: int, older: bool
) -> None:
    """The coordinator's directory is restored to an older state, or replaced: rounds that they know are not there."""
    out, kept, address = tmp_path / "out", tmp_path / "kept", f"127.0.0.1:{unused_port}"
    config_file.write_text(config_file.read_text().replace(f"rounds = {ROUNDS}", "rounds = 500"))
    how = ("--config", config_file, "--data", text_file, "--out", out, "--publish-every", 900, "--lease", 600)
    coordinator = start("first", "train", "coordinate", *how, "--listen", address)
    work = ("train", "work", "--coordinator", address, "--data", text_file, "--patience", WITHIN_S)
    workers = {name: start(name, *work, "--name", name, "--state", tmp_path / name) for name in ("w0", "w1")}
    until(lambda: accepted(out) >= 2, WITHIN_S)
    coordinator.kill(), coordinator.join()
    shutil.copytree(out, kept)
    if older:  # they continue for a while
        coordinator = start("second", "train", "coordinate", *how, "--listen", address)
        until(lambda: accepted(out) >= accepted(kept) + 6, WITHIN_S)
        coordinator.kill(), coordinator.join()
    shutil.rmtree(out / "rounds")
    if older:
        (kept / "rounds").rename(out / "rounds")
    start("third", "train", "coordinate", *how, "--listen", address)
    why = "the coordinator's directory is an older copy" if older else "directory of this run was lost or replaced"
    for name, process in workers.items():
        assert ended(process, WITHIN_S) == 1
        assert f"{why}; restore the right directory" in (tmp_path / f"{name}.log").read_text()
