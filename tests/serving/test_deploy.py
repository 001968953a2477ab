"""Weights are exchanged under running requests: each text is of the old ones or of the new ones, and none fails."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import shutil
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from serving.client import AsyncClient, Client, RouterError
from serving.deploying import deploy, read_release, roll_back
from serving.deployment import Deployment, free_port_block, temporary_deployment
from serving.topology import HostEntry, Topology, local_topology
from serving.v1 import router_pb2
from stages.contents import read_contents
from stages.delivery import offer_of
from stages.errors import OnesweepError
from stages.host import HostSettings
from stages.server import StageServer, StageSettings
from stages.v1 import stage_pb2

Until = Callable[..., Any]
Run = Callable[..., tuple[int, str, str]]
Describe = Callable[[str], stage_pb2.DescribeResponse]
Texts = dict[str, bytes]

PROMPT = b"The sea was calm. "
REQUESTS: dict[str, dict[str, Any]] = {
    "sweep": {"mode": "sweep", "max_bytes": 32},
    "chunked": {"mode": "chunked", "max_bytes": 24, "chunk": 4},
    "ar": {"mode": "ar", "max_bytes": 48},
    "ar-speculative": {"mode": "ar-speculative", "max_bytes": 24, "draft": 2},
    "resample": {"mode": "resample", "max_bytes": 24, "chunk": 4, "candidates": 4},
    "verified": {"mode": "verified", "max_bytes": 16, "draft": 2},
    "infill": {"mode": "infill", "max_bytes": 8, "chunk": 4, "suffix": b" and so on"},
    "local": {"mode": "local", "max_bytes": 16},
}


@pytest.fixture(scope="module")
def old(bundles: Path) -> Path:
    return bundles / "scored"


@pytest.fixture(scope="module")
def new(bundles: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return composed(tmp_path_factory.mktemp("new"), bundles / "other", scorer=bundles / "own" / "ar")


@pytest.fixture(scope="module")
def third(bundles: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return composed(tmp_path_factory.mktemp("third"), bundles / "own", scorer=bundles / "other" / "ar")


def composed(directory: Path, bundle: Path, scorer: Path) -> Path:
    shutil.copytree(bundle, directory, dirs_exist_ok=True)
    shutil.copytree(scorer, directory / "scorer")
    return directory


@pytest.fixture(scope="module")
def texts(old: Path, new: Path, local_ring: Callable[..., Any]) -> dict[str, Texts]:
    """What hosts write that have nothing but one release."""
    written = {}
    for name, bundle in (("old", old), ("new", new)):
        with local_ring(bundle, 3) as client:
            written[name] = {key: answer(client, key) for key in REQUESTS}
    assert all(written["old"][key] != written["new"][key] for key in REQUESTS)
    return written


def answer(client: Client, key: str) -> bytes:
    return client.generate(PROMPT, seed=3, **REQUESTS[key]).output


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
        deploy(partial(AsyncClient, router), read_release(bundle), [], print, 120)
        assert caller.status().release == read_contents(bundle).name

    return have


class Crowd:
    """Threads that ask for text in every mode, again and again."""

    def __init__(self, router: str, threads: int = 3) -> None:
        self.answers: list[tuple[str, bytes, bool]] = []
        """What was asked, what came, and whether it was asked after `switched`."""
        self.errors: list[OnesweepError] = []
        self.switched = False
        self._stop = threading.Event()
        keys = [itertools.islice(itertools.cycle(REQUESTS), first, None) for first in range(threads)]
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
            thread.join(60)
        assert self.errors == []


def test_no_request_fails_or_mixes_weights(
    at: Callable[[Path], None], old: Path, new: Path, router: str, texts: dict[str, Texts], until: Until
) -> None:
    at(old)
    lines: list[str] = []
    crowd = Crowd(router)
    try:
        until(lambda: crowd.has_all(late=False), 60)
        switch = deploy(partial(AsyncClient, router), read_release(new), [], lines.append, 120)
        crowd.switched = True
        until(lambda: crowd.has_all(late=True), 60)
    finally:
        crowd.end()
    assert switch.changed
    assert [line.split(":")[0] for line in lines if "gated and warm" in line] != []
    for key, text, late in crowd.answers:
        assert text in ([texts["new"][key]] if late else [texts["old"][key], texts["new"][key]]), key


def test_back_with_one_command_under_load(
    at: Callable[[Path], None], old: Path, new: Path, router: str, texts: dict[str, Texts], until: Until, onesweep: Run
) -> None:
    at(old)
    at(new)
    crowd = Crowd(router)
    try:
        until(lambda: crowd.has_all(late=False), 60)
        code, out, err = onesweep("deploy", "--rollback", "--router", router)
        crowd.switched = True
        until(lambda: crowd.has_all(late=True), 60)
    finally:
        crowd.end()
    assert (code, err) == (0, "")
    assert f"new requests use release {read_contents(old).name}; before: {read_contents(new).name}" in out
    for key, text, late in crowd.answers:
        assert text in ([texts["old"][key]] if late else [texts["old"][key], texts["new"][key]]), key
    assert "nats on its probe text" in out


def test_what_is_served_already_changes_nothing(
    at: Callable[[Path], None], new: Path, router: str, onesweep: Run
) -> None:
    at(new)
    code, out, _ = onesweep("deploy", new, "--router", router)
    assert (code, out) == (0, f"release {read_contents(new).name} is served already: nothing to do\n")


def test_a_host_that_was_down_serves_what_the_others_serve(
    at: Callable[[Path], None],
    line: Deployment,
    router: str,
    old: Path,
    new: Path,
    caller: Client,
    texts: dict[str, Texts],
    until: Until,
    onesweep: Run,
) -> None:
    at(old)
    at(new)
    line.kill("host-2")
    until(lambda: not caller.status().ready)
    code, _, err = onesweep("deploy", old, "--router", router)
    assert code == 1
    assert "or deploy with --without host-2" in err
    # one whose disk was lost, too, begins with what it was started with, and gets what is served
    line.kill("host-3")
    shutil.rmtree(line.directory / "shelves" / "host-3")
    line.revive("host-2")
    line.revive("host-3")
    until(lambda: caller.status().ready, 60)
    for key in ("ar", "chunked", "verified"):
        assert answer(caller, key) == texts["new"][key]


def test_a_router_that_is_started_anew_serves_the_same(
    at: Callable[[Path], None],
    line: Deployment,
    router: str,
    old: Path,
    new: Path,
    texts: dict[str, Texts],
    until: Until,
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


DIES_IN_THE_TRIAL = """
import os, signal, sys
import serving.rollout
from serving.cli import main

async def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)

serving.rollout.try_out = killed
sys.exit(main(sys.argv[4:]))
"""


def test_a_router_that_dies_in_the_first_deployment_goes_on_with_what_it_served(
    old: Path, new: Path, texts: dict[str, Texts], describe: Describe
) -> None:
    def place(name: str, command: list[str]) -> list[str]:
        """The router's own command stands behind the script: that is how a deployment knows its processes."""
        is_server = name == "router" and "-m" in command
        return [sys.executable, "-P", "-c", DIES_IN_THE_TRIAL, *command[1:]] if is_server else command

    topology = local_topology(3, 3, old, free_port_block(4) + 1)
    with temporary_deployment(topology, old, place=place) as running:
        with pytest.raises(RouterError):
            deploy(partial(AsyncClient, topology.router), read_release(new), [], print, 120)
        for host in topology.hosts:
            assert describe(host.address).releases[-1].name == read_contents(new).name
        running.revive("router")
        running.wait_ready()
        with Client(topology.router) as client:
            assert client.status().release == read_contents(old).name
            assert {key: answer(client, key) for key in REQUESTS} == texts["old"]


def test_two_releases_are_held_and_no_more(
    at: Callable[[Path], None],
    line: Deployment,
    old: Path,
    new: Path,
    third: Path,
    describe: Describe,
    caller: Client,
) -> None:
    at(old)
    at(new)
    at(third)
    due = [read_contents(bundle).name for bundle in (new, third)]
    assert (caller.status().previous, caller.status().release) == tuple(due)
    for host in line.topology.hosts:
        assert [release.name for release in describe(host.address).releases] == due
    for shelf in (line.directory / "shelves").iterdir():
        assert {path.name for path in shelf.iterdir() if path.is_dir()} == set(due)


def test_one_deployment_at_a_time(at: Callable[[Path], None], router: str, old: Path, new: Path, until: Until) -> None:
    at(old)

    async def offer_only() -> AsyncIterator[router_pb2.DeployRequest]:
        yield router_pb2.DeployRequest(store=stage_pb2.StoreRequest(offer=offer_of(read_contents(new))))
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
    until(again, 30)


# What cannot be deployed


def forged(directory: Path, part: int, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Exchange a part's tensors, and make the manifest agree with the new file."""
    (path,) = directory.glob(f"*-{part}-*.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    edit(directory, lambda record: record["parts"][part].update(sha256=digest, bytes=path.stat().st_size))


def edit(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "manifest.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def harm_with(harm: str, bundle: Path) -> None:
    chain, ar = bundle / "chain", bundle / "ar"
    (weights,) = chain.glob("block-1-*.safetensors")
    match harm:
        case "cut":
            weights.write_bytes(weights.read_bytes()[:-8])
        case "missing":
            weights.unlink()
        case "digest":
            edit(chain, lambda record: record["parts"][1].update(sha256="0" * 64))
        case "untrained":
            edit(chain, lambda record: record["parts"].__setitem__(1, None))
        case "shapes":
            forged(ar, 1, lambda tensors: tensors.update({min(tensors): torch.zeros(3)}))
        case "other weights":
            forged(ar, 2, lambda tensors: [tensor.mul_(1.5) for tensor in tensors.values()])
        case "noise":
            edit(chain, lambda record: record["partition"].update(boundaries=[9.0, 7.0, 0.6, 0.2]))
        case "outside":
            edit(chain, lambda record: record["parts"][0].update(file="../../../outside.safetensors"))
        case "no checkpoint":
            shutil.rmtree(bundle)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        ("cut", "bytes, its manifest says"),
        ("missing", "is missing: fetch it again"),
        ("untrained", "part 1 is not trained yet"),
        ("outside", "must be a plain .safetensors name"),
        ("no checkpoint", "no checkpoint in"),
    ],
)
def test_what_is_bad_here_is_not_sent(new: Path, tmp_path: Path, onesweep: Run, harm: str, says: str) -> None:
    shutil.copytree(new, tmp_path / "bad")
    harm_with(harm, tmp_path / "bad")
    code, _, err = onesweep("deploy", tmp_path / "bad", "--router", "127.0.0.1:1")
    assert (code, says in err) == (2, True), err


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        ("digest", "chain/block-1"),
        ("shapes", "has shape"),
        ("other weights", "the weights do not mean what the manifest says"),
        ("noise", "the weights do not mean what the manifest says"),
    ],
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
    describe: Describe,
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
    for shelf in (line.directory / "shelves").iterdir():
        assert {path.name for path in shelf.iterdir() if path.is_dir() and not path.name.startswith(".")} <= due
    for host in line.topology.hosts:
        assert {release.name for release in describe(host.address).releases} <= due


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give the directory of a checkpoint to deploy, or --rollback"),
        (["weights", "--rollback"], "or --rollback"),
        (["--rollback", "--without", "a"], "--without is for a deployment"),
        (["--rollback", "--timeout-s", "0"], "--timeout-s must be above 0"),
    ],
)
def test_options_that_make_no_sense(onesweep: Run, arguments: list[str], says: str) -> None:
    code, _, err = onesweep("deploy", *arguments)
    assert (code, says in err) == (2, True), err


def test_without_shelves(old: Path, new: Path, local_ring: Callable[..., Any], onesweep: Run) -> None:
    with local_ring(old, 1) as client:
        code, _, err = onesweep("deploy", new, "--router", client.address)
        assert (code, "the router has no shelf for releases: start it, and the hosts, with --shelf DIR" in err) == (
            2,
            True,
        )
        code, _, err = onesweep("deploy", "--rollback", "--router", client.address)
        assert (code, "there is no release to go back to" in err) == (2, True)
        assert client.status().release == read_contents(old).name


def test_a_host_that_is_down_can_be_left_out(
    old: Path,
    new: Path,
    tmp_path: Path,
    servers: Any,
    wait_ready: Any,
    onesweep: Run,
    texts: dict[str, Texts],
    until: Until,
) -> None:
    port = free_port_block(3)
    entries = [HostEntry(f"h-{i}", f"127.0.0.1:{port + i}", (0, 1, 2), f"127.0.0.1:{port + i}") for i in (1, 2)]
    topology = Topology(tuple(entries), f"127.0.0.1:{port}", old)

    def start(host: HostEntry) -> Any:
        settings = StageSettings(old, host.blocks, host.listen, (), HostSettings(host.name), shelf=tmp_path / host.name)
        return servers.run(StageServer(settings).run)

    running = [start(host) for host in entries]
    servers.router(topology, old, shelf=tmp_path / "router")
    wait_ready(topology.router)
    with Client(topology.router) as client:
        until(lambda: [host.ready for host in client.status().hosts] == [True, True], 60)
        running[1].end()
        until(lambda: [host.ready for host in client.status().hosts] == [True, False])
        code, _, err = onesweep("deploy", new, "--router", topology.router, "--without", "nobody")
        assert (code, "there is no host 'nobody' to do without; there are h-1, h-2" in err) == (2, True)
        assert onesweep("deploy", new, "--router", topology.router)[0] == 1
        code, out, err = onesweep("deploy", new, "--router", topology.router, "--without", "h-2", "--json")
        assert (code, json.loads(out)["changed"]) == (0, True), err
        assert answer(client, "ar") == texts["new"]["ar"]
        start(entries[1])
        name = read_contents(new).name
        until(lambda: name in client.status().hosts[1].releases, 60)
