"""`onesweep serve`: hosts without a checkpoint get a model's stages, and hold them for the next run."""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from serving.cli.deployment import temporary_deployment
from serving.cli.ports import free_port_block
from serving.client.client import Client
from serving.router.topology import local_topology
from tests.serving.cli.terminal import Terminal
from tests.stages.host.test_empty_hosts import described, empty_host
from tests.stages.importing.published import SHAPE, learnt, write_folder

pytestmark = pytest.mark.slow

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    whole_groups = replace(SHAPE, head_dim=8)
    return write_folder(tmp_path_factory.mktemp("model"), learnt(whole_groups), whole_groups)


@pytest.fixture
def addresses(tmp_path: Path) -> Iterator[list[str]]:
    """Of three waiting hosts."""
    first = free_port_block(3)
    names = [f"127.0.0.1:{first + i}" for i in range(3)]
    with ExitStack() as stack:
        for i, address in enumerate(names):
            stack.enter_context(empty_host(address, tmp_path / f"releases-{i}"))
        for address in names:
            described(address, ready=False)
        yield names


@contextmanager
def served(
    model: Path, addresses: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, str]]:
    """What the command says until it is ready, and its router."""
    monkeypatch.setenv("ONESWEEP_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    port = free_port_block(2)
    options = ["--port", port, "--http", f"127.0.0.1:{port + 1}"]
    terminal = Terminal("serve", model, "--hosts", ",".join(addresses), *options)
    try:
        said = terminal.expect("Ctrl-C stops them.")
        assert f"http://127.0.0.1:{port + 1}" in said
        yield said, f"127.0.0.1:{port}"
        terminal.type("\x03")
        assert terminal.end() in (0, 128 + signal.SIGINT)
    finally:
        terminal.close()


def test_hosts_get_their_stages_and_a_second_run_sends_nothing(
    model: Path, addresses: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, onesweep: Run
) -> None:
    def text_of(router: str) -> str:
        asked = ["the sea", "--mode", "ar", "--temperature", 0, "--max-tokens", 8]
        code, text, err = onesweep("generate", *asked, "--router", router)
        assert code == 0, err
        return text

    code, _, err = onesweep("import", model, "--blocks", 1, "--out", tmp_path / "whole")
    assert code == 0, err
    topology = local_topology(1, 1, tmp_path / "whole", free_port_block(2) + 1)
    with temporary_deployment(topology, tmp_path / "whole"):
        expected = text_of(topology.router)
    with served(model, addresses, tmp_path, monkeypatch) as (said, router):
        assert said.count(" MB sent, blocks ") == 3
        assert "the last host drafts by: copy:q8" in said
        assert [path.parts[-4] for path in tmp_path.glob("releases-*/*/local/*.safetensors")] == ["releases-2"]
        with Client(router) as client:
            assert [list(host.blocks) for host in client.status().hosts] == [[0], [1], [2]]
        assert text_of(router) == expected != ""
    with served(model, addresses, tmp_path, monkeypatch) as (said, router):
        assert "MB sent" not in said
        assert "importing" not in said
        assert text_of(router) == expected


def test_a_model_that_fits_no_host_is_refused_with_what_is_missing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, onesweep: Run
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    address = f"127.0.0.1:{free_port_block(1)}"
    with empty_host(address, tmp_path / "releases", "--session-mb", "100000000"):
        described(address, ready=False)
        code, _, err = onesweep("serve", model, "--hosts", address)
        assert code != 0
        assert f"MB are missing; add memory or hosts (room: {address} 0.0 MB)" in err
        code, _, err = onesweep("import", model, "--blocks", 1, "--out", tmp_path / "cut")
        assert code == 0, err
        code, _, err = onesweep("serve", tmp_path / "cut", "--hosts", address)
        assert code != 0
        assert f"host {address}: its stage takes" in err
        assert "MB are missing" in err
