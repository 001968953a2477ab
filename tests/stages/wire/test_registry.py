"""What a host may say of itself, and what is believed of what others say."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serving.cli.__main__ import main
from stages.errors import InputError
from stages.wire.etcd import EtcdClient
from stages.wire.registry import (
    MAX_ENDPOINTS,
    MAX_ENTRY_BYTES,
    MAX_PREFIX,
    Registration,
    RegistrySettings,
    parse_url,
    read_entry,
    successors,
    write_entry,
)
from tests.conftest import PATIENCE_S, until

PARIS = Registration("paris", "10.8.0.1:7701", (0, 1))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 10_000, "not JSON"),
        (b'{"name": ' + b"9" * 10_000 + b"}", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "names another host"),
        (b" " * (MAX_ENTRY_BYTES + 1), "the limit is"),
    ],
)
def test_what_is_no_registration_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_entry("paris", data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "tokyo"}, "names another host"),
        ({"address": 7}, "address is not text"),
        ({"address": ""}, "must be HOST:PORT"),
        ({"address": "10.8.0.1:0"}, "not 0"),
        ({"address": "0.0.0.0:7701"}, "cannot be dialled"),
        ({"address": "[::]:7701"}, "cannot be dialled"),
        ({"address": "a" * 300 + ":1"}, "at most 255"),
        ({"address": "unix:/tmp/x"}, "must be HOST:PORT"),
        ({"blocks": [1]}, "blocks is not"),
        ({"blocks": [1, 0]}, "blocks is not"),
        ({"blocks": [-1, 0]}, "blocks is not"),
        ({"blocks": [False, True]}, "blocks is not"),
        ({"blocks": [0, 10**9]}, "blocks is not"),
        ({"blocks": "0"}, "blocks is not"),
    ],
)
def test_a_field_that_cannot_be_true_is_refused(change: dict[str, Any], message: str) -> None:
    record = {**json.loads(write_entry(PARIS)), **change}
    with pytest.raises(InputError, match=message):
        read_entry("paris", json.dumps(record).encode())


def host(name: str, port: int, *blocks: int) -> Registration:
    return Registration(name, f"10.8.0.1:{port}", blocks)


def test_successors_begin_where_a_host_ends() -> None:
    a, b, c, d = host("a", 1, 0), host("b", 2, 1), host("c", 3, 1, 2), host("d", 4, 2)
    hosts = [a, b, c, d]
    assert successors(hosts, a, parts=3) == ["10.8.0.1:2", "10.8.0.1:3"]
    assert successors(hosts, b, parts=3) == ["10.8.0.1:4"]
    assert successors(hosts, c, parts=3) == successors(hosts, d, parts=3) == ["10.8.0.1:1"]


# What `onesweep host` makes of --registry.
URL = "etcd://127.0.0.1:1/onesweep"


def test_a_url_is_taken_apart() -> None:
    assert parse_url("etcd://10.0.0.1:2379,[::1]:2379/a/b-1") == (("10.0.0.1:2379", "[::1]:2379"), "/a/b-1")
    settings = RegistrySettings(*parse_url(URL))
    assert settings.url == URL
    assert not settings.tls
    assert RegistrySettings(*parse_url(URL), ca=Path("ca.pem")).tls


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:2379/onesweep",
        "http://127.0.0.1:2379/onesweep",
        "etcd://127.0.0.1:2379",
        "etcd://127.0.0.1:2379/",
        "etcd:///onesweep",
        "etcd://127.0.0.1/onesweep",
        "etcd://127.0.0.1:2379,/onesweep",
        "etcd://127.0.0.1:0/onesweep",
        "etcd://0.0.0.0:2379/onesweep",
        "etcd://user:secret@127.0.0.1:2379/onesweep",
        "etcd://127.0.0.1:2379/one//sweep",
        "etcd://127.0.0.1:2379/one sweep",
        "etcd://127.0.0.1:2379/" + "a" * (MAX_PREFIX + 1),
        "etcd://" + ",".join(["127.0.0.1:2379"] * (MAX_ENDPOINTS + 1)) + "/onesweep",
    ],
)
def test_a_url_that_cannot_be_used_is_refused(url: str) -> None:
    with pytest.raises(InputError):
        parse_url(url)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--registry", "etcd://"), "must be etcd://HOST:PORT[,HOST:PORT]/PREFIX"),
        (("--registry", URL, "--next", "127.0.0.1:2"), "--next and --registry both say who comes next"),
        (("--advertise", "127.0.0.1:2"), "--advertise says what a registry hands out"),
        (("--registry", URL + "?authority=ca.pem"), "there is no 'authority', only ?ca=FILE&cert=FILE&key=FILE"),
        (("--registry", URL + "?cert=a.pem"), "cert=FILE and key=FILE belong together"),
        (("--registry", URL + "?ca=/nowhere/ca.pem"), "there is no file /nowhere/ca.pem"),
        (("--registry", "etcd://10.8.0.9:2379/onesweep"), "10.8.0.9:2379 is on another machine and traffic would not"),
        (("--registry", URL, "--advertise", "0.0.0.0:7701"), "--advertise '0.0.0.0:7701' cannot be dialled"),
        (("--registry", URL, "--advertise", "here"), "--advertise 'here' must be HOST:PORT"),
    ],
)
def test_flags_that_contradict_each_other(bundles: Path, capfd, arguments: tuple[str, ...], message: str) -> None:
    stage = ("host", "--checkpoint", str(bundles / "own"), "--blocks", "0", "--listen", "127.0.0.1:0")
    assert main([*stage, *arguments]) == 2
    err = capfd.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_stage_server_registers_itself_and_leaves(bundles: Path, registry_url: str) -> None:
    gateway = EtcdClient(RegistrySettings(*parse_url(registry_url)))
    arguments = ("host", "tokyo", "--checkpoint", bundles / "own", "--blocks", "1,2", "--listen", "127.0.0.1:0")
    more = ("--threads", "1", "--registry", registry_url)
    command = [sys.executable, "-P", "-m", "serving.cli", *map(str, arguments + more)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as stage:
        try:
            (entry,) = until(lambda: gateway.snapshot())
            registration = read_entry(entry.name, entry.value)
            assert registration.name == "tokyo"
            assert registration.blocks == (1, 2)
            assert registration.address.startswith("127.0.0.1:")
            stage.send_signal(signal.SIGTERM)
            assert stage.wait(PATIENCE_S) == 0, stage.stderr and stage.stderr.read()
            assert gateway.snapshot() == []
        finally:
            stage.kill()
