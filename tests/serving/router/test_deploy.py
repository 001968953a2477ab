"""Weights are exchanged under running requests: each text is of the old ones or of the new ones, and none fails."""

import asyncio
import itertools
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from serving.cli.deploy import deploying, read_release, roll_back
from serving.cli.deployment import Deployment, temporary_deployment
from serving.cli.ports import free_port_block
from serving.client.client import AsyncClient, Client, RouterError
from serving.router.topology import local_topology
from serving.v1 import router_pb2
from stages.checkpoint.release_store import read_release_manifest
from stages.checkpoint.release_transfer import offer_of
from stages.errors import OnesweepError
from stages.v1 import stage_pb2
from tests.conftest import PATIENCE_S, until
from tests.serving.conftest import describe
from tests.serving.harm import harm_with
from tests.serving.releases import REQUESTS, Texts, answer

pytestmark = pytest.mark.slow

Run = Callable[..., tuple[int, str, str]]


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
        """What was asked, what came, and whether it was asked after `switched`."""
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
        """Whether every mode answered, before or after the switch."""
        return bool(self.errors) or {key for key, _, after in self.answers if after is late} == set(REQUESTS)

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert self.errors == []


def under_load(router: str, switch: Callable[[], Any], before: Texts, after: Texts) -> Any:
    """What `switch` returns, while requests in every mode go on: each gets the text of one of the two releases."""
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
    assert f"new requests use release {names[0]}; before: {names[1]}" in out


def test_a_router_that_is_started_anew_serves_the_same(
    at: Callable[[Path], None], line: Deployment, router: str, old: Path, new: Path, texts: dict[str, Texts]
) -> None:
    at(old)
    at(new)
    line.kill("router")
    line.revive("router")
    line.wait_ready()
    with Client(router) as client:
        assert {key: answer(client, key) for key in REQUESTS} == texts["new"]
        roll_back(partial(AsyncClient, router), print, 120)
        assert {key: answer(client, key) for key in ("local", "ar", "sweep")} == {
            key: texts["old"][key] for key in ("local", "ar", "sweep")
        }


def test_one_deployment_at_a_time(at: Callable[[Path], None], router: str, old: Path, new: Path) -> None:
    at(old)

    async def offer_only() -> AsyncIterator[router_pb2.DeployRequest]:
        yield router_pb2.DeployRequest(store=stage_pb2.StoreRequest(offer=offer_of(read_release_manifest(new))))
        await enough.wait()

    enough = asyncio.Event()

    async def main() -> None:
        async with AsyncClient(router) as client, aclosing(client.exchange(offer_only(), 60)) as first:
            await anext(first)
            for requests in (offer_only(), None):
                with pytest.raises(RouterError, match="another deployment is under way") as caught:
                    assert not [each async for each in client.exchange(requests, 60)]
                assert caught.value.exit_code == 1
            enough.set()
            await asyncio.sleep(0)

    def again() -> bool:
        with suppress(RouterError):  # the one that was left is being taken back
            at(new)
            return True
        return False

    asyncio.run(main())
    until(again)


@pytest.mark.parametrize(
    ("harm", "says"), [("digest", "chain/block-1"), ("noise", "the weights do not mean what the manifest says")]
)
def test_a_bad_checkpoint_leaves_everything_as_it_was(
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


def test_hosts_take_only_what_a_key_that_they_trust_has_signed(
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

        code, said = deployed()
        assert (code, "is not signed" in said, "host-1" in said) == (2, True, True), said
        assert onesweep("sign", bundle, "--key", certs / "ben.key")[0] == 0
        assert "signed by no key that is trusted here" in deployed()[1]
        signers.write_bytes((certs / "ada.pub").read_bytes() + (certs / "ben.pub").read_bytes())
        assert deployed()[0] == 0  # trusted from now on, without a restart
        (bundle / "frontier.json").write_text("{}")
        assert "signed by no key that is trusted here" in deployed()[1]  # it is another release
