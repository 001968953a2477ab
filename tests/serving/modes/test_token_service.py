"""What holds for byte models under load and harm holds for token models: failover, audits, deployments."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from onesweep.serving.cli.deploy import deploy, read_release
from onesweep.serving.cli.deployment import Deployment, temporary_deployment
from onesweep.serving.client.client import AsyncClient, Client
from onesweep.stages.checkpoint.release_store import read_release_manifest
from onesweep.stages.model.llama import LlamaStage
from tests.conftest import until, wait_ready
from tests.serving.pretrained import ids, text_of, write_model, written
from tests.serving.releases import all_ready
from tests.serving.router.test_replicas import PROMPT, Streaming, busy, doubled

pytestmark = pytest.mark.slow

LENGTH = 300


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, list[LlamaStage]]:
    directories = [tmp_path_factory.mktemp(name) for name in ("one", "other")]
    made = {directory: write_model(directory, seed=seed) for seed, directory in enumerate(directories)}
    for seed, directory in enumerate(directories, 2):
        write_model(directory / "local", seed=seed)
    return made


@pytest.fixture(scope="module")
def doubles(models: dict[Path, list[LlamaStage]]) -> Iterator[Deployment]:
    directory = next(iter(models))
    with temporary_deployment(doubled(directory), directory) as running:
        yield running


def expected(stages: list[LlamaStage], count: int) -> str:
    return text_of(written(stages, ids(PROMPT.decode()), count, temperature=0.8, seed=3))


def test_a_release_is_deployed_with_its_tokenizer_and_its_drafter(
    doubles: Deployment, caller: Client, models: dict[Path, list[LlamaStage]]
) -> None:
    until(lambda: all_ready(caller), 30)
    for directory in reversed(models):
        deploy(partial(AsyncClient, doubles.topology.router), read_release(directory), [], print, 120)
        assert caller.status().release == read_release_manifest(directory).name
        result = caller.generate(PROMPT, mode="ar", max_tokens=16, temperature=0.8, seed=3)
        assert result.text == expected(models[directory], 16)
        assert caller.generate(PROMPT, mode="ar-speculative", drafter="model", max_tokens=8, seed=3).drafted


@pytest.mark.parametrize(("mode", "letter"), [("ar-speculative", "b"), ("resample", "a")])
def test_a_host_that_is_killed_costs_no_text(doubles: Deployment, caller: Client, mode: str, letter: str) -> None:
    asked: dict[str, Any] = {"mode": mode, "max_tokens": LENGTH, "temperature": 0.8}
    until(lambda: all_ready(caller), 30)
    whole = caller.generate(PROMPT, seed=3, **asked).output
    request = Streaming(caller, asked)
    victim = busy(doubles, letter)
    doubles.kill(victim)
    result = request.end()
    assert result.output == whole
    assert result.replays >= 1
    doubles.revive(victim)


def test_honest_hosts_pass_every_audit(models: dict[Path, list[LlamaStage]], servers: Any) -> None:
    (directory, stages), *_ = models.items()
    topology = doubled(directory)
    servers.hosts(topology, directory)
    servers.router(topology, directory, ring={"audit_share": 1.0})
    wait_ready(topology.router)
    with Client(topology.router) as client:
        result = client.generate(PROMPT, mode="ar", max_tokens=8, temperature=0.8, seed=3)
        assert result.text == expected(stages, 8)
        audits = client.status().audits
        assert (audits.audited, audits.faulty_hosts) == (8, 0)
