"""A site: machines that work as one worker, with one lost and back again, and with mistakes of those who start it."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from loadtest.lab.lab import temporary_lab
from loadtest.lab.profile import Link, Profile
from stages.errors import InputError, ResumeError, ServiceError
from tests.conftest import until
from tests.trainer.rounds.network.calls import Start
from tests.trainer.small import corpus, events_of, rounds_config
from trainer.blocks.data import Corpus
from trainer.rounds.settings import WorkerSettings
from trainer.rounds.simulation import SimulatedWorkers, Simulation
from trainer.rounds.site import Site
from trainer.rounds.spec import RunSpec, replica_seed
from trainer.rounds.store import audit
from trainer.rounds.worker import work
from trainer.rounds.worker_state import STATE_NAME, load_worker

WITHIN_S, STEPS = 600.0, 20
# Muon computes in bfloat16, where sums in another order are far apart.
config = replace(rounds_config, matrix_optimizer="adamw")
Machine = Callable[..., Future[int]]


class JoinedCorpus(Corpus):
    """The text of all three machines of a site, which work as replica 0."""

    def batch(self, seed: int, step: int, sequences: int, length: int) -> Tensor:
        seeds = [replica_seed(seed, 0, machine) for machine in range(3)]
        return torch.cat([Corpus.batch(self, each, step, sequences // 3, length) for each in seeds])


@pytest.fixture
def machine(tmp_path: Path, unused_port: int) -> Iterator[Machine]:
    """`machine(number, net)`: one of a site of three on a thread; `net` is the first one's coordinator."""
    stop, site = threading.Event(), f"127.0.0.1:{unused_port}"
    with ThreadPoolExecutor(8) as pool:

        def start(number: int, net: Any = None, text: Corpus = corpus, patience_s: float = 60.0, **changes: Any) -> Any:
            fields = {"site": site, "machine": number, "machines": 3, **changes}
            settings = WorkerSettings(f"m{number}", tmp_path / f"m{number}", **fields)

            def run() -> int:
                found = Site(settings, False, patience_s, stop.is_set)
                if number:
                    return found.follow(text)
                trained = work(net.link(patience_s=60.0), text, settings, found)
                found.end()
                return trained

            return pool.submit(run)

        yield start
        stop.set()


def test_a_site_makes_the_weights_of_one_worker_with_all_its_text(network: Start, machine: Machine) -> None:
    net = network(config, replicas=1, model="ar")
    jobs = [machine(number, net) for number in range(3)]
    assert [job.result(WITHIN_S) for job in jobs] == [3, 6, 6]
    accepted = [record for record in net.ledger.store.records() if record["kind"] == "accepted"]
    assert {record["sequences"] / record["steps"] for record in accepted} == {3 * config.sequences}
    until(lambda: net.over, WITHIN_S)  # modules are drawn from one generator: no other code may draw meanwhile
    joined = JoinedCorpus(corpus.name, corpus.train, corpus.valid, corpus.tokenizer)
    spec = RunSpec.of(replace(net.config, sequences=3 * config.sequences), joined)
    engine = Simulation(spec, joined, SimulatedWorkers())
    engine.run()
    expected = engine.published()["ar"]
    found = net.ledger.weights("ar")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)


def records(out: Path, worker: str) -> list[dict[str, Any]]:
    events = events_of(out / "rounds")
    return [event for event in events if event["kind"] == "accepted" and event["worker"] == worker]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_killed_machine_costs_its_share_until_it_returns(needs_lab: None, tmp_path: Path, text_file: Path) -> None:
    """Each in a network namespace of its own; a plain worker shares the run."""
    toml, out = tmp_path / "run.toml", tmp_path / "out"
    toml.write_text(
        "sequences = 2\nbfloat16 = false\n[architecture]\nparts = 1\nlayers = 1\nwidth = 16\nheads = 2\n"
        'context_length = 32\n[rounds]\nmodel = "ar"\nrounds = 1000\ndeadline_s = 0\n'
        f"steps_per_round = {STEPS}\n"
    )
    with temporary_lab(Profile("near", Link(delay_ms=1)), 2) as lab, contextlib.ExitStack() as stack:

        def run(node: str, name: str, *arguments: object) -> subprocess.Popen[bytes]:
            log = stack.enter_context((tmp_path / f"{name}.log").open("ab"))
            words = ["-m", "onesweep", "train", *map(str, arguments), "--data", str(text_file), "--threads", "1"]
            process = subprocess.Popen(lab.command(node, [sys.executable, *words]), stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        def worker(node: str, name: str, *arguments: object) -> subprocess.Popen[bytes]:
            own = ("--name", name, "--state", tmp_path / name, "--pace-s", 0.1, "--save-every", 0)
            return run(node, name, "work", "--coordinator", "127.0.0.1:7800", *own, *arguments)

        def machine(number: int) -> subprocess.Popen[bytes]:
            site = ("--site", f"{lab.address('router')}:7900", "--machines", 3, "--machine", number)
            return worker([*lab.places][number], f"m{number}", *site)

        def in_the_middle() -> bool:
            """True once the site has made some steps of a round."""
            try:
                progress = load_worker(tmp_path / "m0" / STATE_NAME)[1]
            except (ResumeError, RuntimeError):
                return False  # it was replaced meanwhile: safetensors opens a file twice
            return progress.round is not None and 3 <= progress.steps < STEPS / 2

        def shares(count: int) -> bool:
            """True if the newest update has the text of so many machines."""
            found = records(out, "m0")
            return bool(found) and found[-1]["sequences"] == count * 2 * found[-1]["steps"]

        run("router", "hub", "coordinate", "--config", toml, "--out", out, "--listen", "127.0.0.1:7800")
        worker("router", "plain")
        machines = [machine(number) for number in range(3)]
        until(lambda: shares(3), WITHIN_S)
        until(in_the_middle, WITHIN_S)
        machines[2].kill()
        until(lambda: shares(2), WITHIN_S)
        machines[2] = machine(2)
        until(lambda: shares(3), WITHIN_S)
        until(in_the_middle, WITHIN_S)
        machines[0].kill()  # the first: the others wait for it, and it resumes from its state
        seen, machines[0] = len(records(out, "m0")), machine(0)
        until(lambda: len(records(out, "m0")) > seen and shares(3), WITHIN_S)
        for lost in machines[1:]:
            lost.kill()
        until(lambda: shares(1), WITHIN_S)
        log = (tmp_path / "m0.log").read_text()
        mine, theirs = records(out, "m0"), records(out, "plain")
    assert "1 of the site's 3 machines share the steps: this one continues alone" in log
    text = [record["sequences"] / 2 / STEPS for record in mine]
    assert any(2 < machines < 3 for machines in text), "it had its share until it was killed"
    assert [record["round"] for record in mine] == list(range(len(mine)))
    assert len(theirs) >= len(mine) - 1
    assert audit(out / "rounds").problems == []
    losses = [record["losses"]["next_byte_nats"] for record in mine]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.slow
def test_a_machine_that_does_not_belong_to_the_site_is_refused(
    network: Start, machine: Machine, unused_port: int
) -> None:
    net = network(config, replicas=1, model="ar")
    first = machine(0, net)
    other = Corpus("other", corpus.train[:-100], corpus.valid, corpus.tokenizer)
    with pytest.raises(InputError, match=r"cannot join the site at .* your training text .* is not that of this run"):
        machine(1, text=other).result(WITHIN_S)
    with pytest.raises(ServiceError, match=r"cannot listen on 127.0.0.1:.*--site must be a free port"):
        machine(0, net).result(WITHIN_S)
    jobs = [machine(number) for number in (1, 1, 2)]
    (twin,) = [job for job in jobs if job.exception(WITHIN_S) is not None]
    with pytest.raises(InputError, match="another machine of this site has number 1: give each its own --machine"):
        twin.result()
    assert [first.result(WITHIN_S), *(job.result() for job in jobs if job is not twin)] == [3, 6, 6]


@pytest.mark.parametrize(
    ("number", "changes", "error", "sentence"),
    [
        (1, {}, ServiceError, "no site answers at 127.0.0.1:.*; gave up after 0 s"),
        (3, {}, InputError, "--machine must be 0 to 2 in a site of 3 machines, not 3"),
        (0, {"site": "8.8.8.8:7900"}, InputError, "8.8.8.8 is a public address, .* or, behind a firewall, allow it"),
        (0, {"site": "here"}, InputError, "--site 'here' must be HOST:PORT"),
    ],
)
def test_a_machine_that_cannot_start_reports_the_reason(
    machine: Machine, number: int, changes: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        machine(number, patience_s=0.0, **changes).result(WITHIN_S)
