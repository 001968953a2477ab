"""Weights are exchanged under running requests: each text is of the old ones or of the new ones, and none fails."""

import asyncio
import itertools
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from serving.cli.deploy import deploying, read_release, roll_back
from serving.cli.deployment import Deployment, temporary_deployment
from serving.cli.ports import free_port_block
from serving.client.client import AsyncClient, Client
from serving.router.topology import local_topology
from serving.v1 import router_pb2
from stages.checkpoint.release_store import read_release_manifest
from stages.errors import OnesweepError
from stages.host.server import StageServer
from stages.host.settings import HostSettings, StageSettings
from tests.conftest import PATIENCE_S, Run, until, wait_ready
from tests.serving.conftest import describe
from tests.serving.harm import harm_with
from tests.serving.releases import REQUESTS, Texts, answer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def line(old: Path) -> Iterator[Deployment]:
    topology = local_topology(3, 3, old, free_port_block(4) + 1)
    with temporary_deployment(topology, old) as running:
        yield running


@pytest.fixture(scope="module")
def router(line: Deployment) -> str:
    return line.topology.router


@pytest.fixture
def caller(router: str) -> Iterator[Client]:
    with Client(router) as client:
        yield client


@pytest.fixture
def at(router: str, caller: Client) -> Callable[[Path], None]:
    """Has this bundle served."""

    def have(bundle: Path) -> None:
        asyncio.run(deploying(partial(AsyncClient, router), read_release(bundle), [], print, 120))
        assert caller.status().release == read_release_manifest(bundle).name

    return have


class Crowd:
    """Threads that ask for text in every mode, again and again."""

    def __init__(self, router: str) -> None:
        self.answers: list[tuple[str, bytes, bool]] = []
        """Requests, their texts, and True for those sent after `switched`."""
        self.errors: list[OnesweepError] = []
        self.switched = False
        self._stop = threading.Event()
        keys = [itertools.islice(itertools.cycle(REQUESTS), first, None) for first in range(3)]
        self._threads = [threading.Thread(target=self._ask, args=(router, each)) for each in keys]
        for thread in self._threads:
            thread.start()

    def _ask(self, router: str, keys: Iterator[str]) -> None:
        with Client(router) as client:
            while not self._stop.is_set():
                key, late = next(keys), self.switched
                try:
                    self.answers.append((key, answer(client, key), late))
                except OnesweepError as error:
                    self.errors.append(error)
                    return

    def has_all(self, late: bool) -> bool:
        """True once every mode answered, before or after the switch."""
        return bool(self.errors) or {key for key, _, after in self.answers if after is late} == set(REQUESTS)

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert self.errors == []


def under_load(router: str, switch: Callable[[], Any], before: Texts, after: Texts) -> Any:
    """The result of `switch` under requests in every mode: each gets the text of one of the two releases."""
    crowd = Crowd(router)
    try:
        until(lambda: crowd.has_all(late=False))
        outcome = switch()
        crowd.switched = True
        until(lambda: crowd.has_all(late=True))
    finally:
        crowd.end()
    for key, text, late in crowd.answers:
        assert text in ([after[key]] if late else [before[key], after[key]]), key
    return outcome


def test_no_request_fails_or_mixes_weights(
    at: Callable[[Path], None], old: Path, new: Path, router: str, texts: dict[str, Texts], onesweep: Run
) -> None:
    """On the way to a release, and back with one command."""
    at(old)
    lines: list[str] = []

    def forth() -> router_pb2.Switch:
        return asyncio.run(deploying(partial(AsyncClient, router), read_release(new), [], lines.append, 120))

    assert under_load(router, forth, texts["old"], texts["new"]).changed
    assert any("gated and warm" in line for line in lines)
    back = partial(onesweep, "deploy", "--rollback", "--router", router)
    code, out, err = under_load(router, back, texts["new"], texts["old"])
    assert (code, err) == (0, "")
    names = [read_release_manifest(bundle).name for bundle in (old, new)]
    assert f"new requests use release {names[0]}; previous: {names[1]}" in out


def test_a_host_that_was_down_gets_the_deployed_release(
    at: Callable[[Path], None],
    line: Deployment,
    router: str,
    old: Path,
    new: Path,
    caller: Client,
    texts: dict[str, Texts],
    onesweep: Run,
) -> None:
    at(old)
    at(new)
    line.kill("host-2")
    until(lambda: not caller.status().ready)
    code, _, err = onesweep("deploy", old, "--router", router)
    assert (code, "or deploy with --without host-2" in err) == (1, True), err
    assert onesweep("deploy", old, "--router", router, "--without", "nobody")[0] == 2
    assert "no host that answers holds block 1" in onesweep("deploy", "--rollback", "--router", router)[2]
    assert not any("another router" in host.warning for host in caller.status().hosts)
    # one whose disk was lost, too, begins with what it was started with, and gets what is served
    line.kill("host-3")
    shutil.rmtree(line.directory / "releases" / "host-3")
    line.revive("host-2")
    line.revive("host-3")
    until(lambda: caller.status().ready)
    for key in ("ar", "chunked", "resample"):
        assert answer(caller, key) == texts["new"][key]


def test_a_restarted_router_serves_the_deployed_release(
    at: Callable[[Path], None], line: Deployment, router: str, old: Path, new: Path, texts: dict[str, Texts]
) -> None:
    at(old)
    at(new)
    line.kill("router")
    line.revive("router")
    line.wait_ready()
    with Client(router) as client:
        assert {key: answer(client, key) for key in REQUESTS} == texts["new"]
        asyncio.run(roll_back(partial(AsyncClient, router), print, 120))
        assert {key: answer(client, key) for key in ("local", "ar", "sweep")} == {
            key: texts["old"][key] for key in ("local", "ar", "sweep")
        }


@pytest.mark.parametrize(
    ("harm", "says"), [("digest", "chain/block-1"), ("noise", "the weights do not match the manifest")]
)
def test_a_bad_checkpoint_changes_nothing(
    at: Callable[[Path], None],
    line: Deployment,
    router: str,
    old: Path,
    new: Path,
    tmp_path: Path,
    caller: Client,
    texts: dict[str, Texts],
    onesweep: Run,
    harm: str,
    says: str,
) -> None:
    at(old)
    before = caller.status()
    shutil.copytree(new, tmp_path / "bad")
    harm_with(harm, tmp_path / "bad")
    code, _, err = onesweep("deploy", tmp_path / "bad", "--router", router)
    assert (code, says in err) == (2, True), err
    after = caller.status()
    assert (after.release, after.previous) == (before.release, before.previous)
    assert answer(caller, "ar") == texts["old"]["ar"]
    due = {before.release, before.previous} - {""}
    stores = (line.directory / "releases").iterdir()
    assert {path.name for store in stores for path in store.iterdir() if path.is_dir() and path.name[0] != "."} <= due
    for host in line.topology.hosts:
        assert {release.name for release in describe(host.address).releases} <= due


def test_hosts_accept_only_releases_signed_by_a_trusted_key(
    old: Path, new: Path, tmp_path: Path, onesweep: Run
) -> None:
    certs, signers, bundle = tmp_path / "certs", tmp_path / "signers.pem", tmp_path / "new"
    for name in ("ada", "ben"):
        assert onesweep("certs", "issue", "signer", name, "--dir", certs)[0] == 0
    signers.write_bytes((certs / "ada.pub").read_bytes())
    shutil.copytree(new, bundle)
    topology = local_topology(1, 3, old, free_port_block(2) + 1)
    with temporary_deployment(topology, old, host_options=("--set", f"signers={signers}")):

        def deployed() -> tuple[int, str]:
            code, out, err = onesweep("deploy", bundle, "--router", topology.router)
            return code, out + err

        code, printed = deployed()
        assert (code, "is not signed" in printed, "host-1" in printed) == (2, True, True), printed
        assert onesweep("sign", bundle, "--key", certs / "ben.key")[0] == 0
        assert "is not signed by a trusted key" in deployed()[1]
        signers.write_bytes((certs / "ada.pub").read_bytes() + (certs / "ben.pub").read_bytes())
        assert deployed()[0] == 0  # trusted from now on, without a restart
        (bundle / "frontier.json").write_text("{}")
        assert "is not signed by a trusted key" in deployed()[1]  # it is another release


def test_two_routers_switch_together_or_not_at_all(old: Path, new: Path, tmp_path, servers, onesweep: Run) -> None:
    topology = local_topology(1, 3, old, free_port_block(2) + 1)
    (host,), second = topology.hosts, f"127.0.0.1:{free_port_block(1)}"
    both, alone = ["--router", f"{topology.router},{second}"], ["--router", topology.router]
    settings = StageSettings(old, host.blocks, host.listen, (), HostSettings(host.name), releases=tmp_path / host.name)
    servers.run(StageServer(settings).run)
    servers.router(topology, old, releases=tmp_path / "first")
    lacking = servers.router(replace(topology, router=second), old)
    before, after = (read_release_manifest(each).name for each in (old, new))

    def served(warns: bool) -> list[str]:
        with Client(topology.router) as first, Client(second) as other:
            until(lambda: ("deployed release" in other.status().hosts[0].warning) is warns)
            return [each.status().release for each in (first, other)]

    wait_ready(topology.router)
    wait_ready(second)
    assert f"router {second}: the router has no release store" in onesweep("deploy", new, *both)[2]
    assert served(warns=False) == [before, before], "the first one could switch, and did not"
    until(lambda: onesweep("deploy", new, *alone)[0] == 0)  # once the first one is back
    assert served(warns=True) == [after, before]
    assert f"rolling back the router at {topology.router}" in onesweep("deploy", "--rollback", *alone)[1]
    lacking.end()
    servers.router(replace(topology, router=second), old, releases=tmp_path / "second")
    wait_ready(second)
    code, out, err = onesweep("deploy", new, *both)
    assert (code, out.count("modes that work"), served(warns=False)) == (0, 1, [after, after]), err
