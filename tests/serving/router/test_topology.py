"""Topology files: what they say, and what is said about a wrong one."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.router.topology import HostEntry, local_topology, parse_topology, read_topology
from stages.errors import ConfigError, InputError
from tests.conftest import Run

HOSTS = """
[[hosts]]
address = "10.0.0.1:7701"
blocks = [0, 1]

[[hosts]]
name = "tokyo"
address = "tokyo.example:7701"
listen = "0.0.0.0:7701"
blocks = [2]
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_is_read(tmp_path: Path) -> None:
    text = 'checkpoint = "weights"\n[router]\nlisten = "127.0.0.1:8000"\n' + HOSTS
    topology = read_topology(write(tmp_path / "t.toml", text))
    assert topology.hosts == (
        HostEntry("host-1", "10.0.0.1:7701", (0, 1), "10.0.0.1:7701"),
        HostEntry("tokyo", "tokyo.example:7701", (2,), "0.0.0.0:7701"),
    )
    assert (topology.router, topology.blocks) == ("127.0.0.1:8000", 3)
    assert topology.checkpoint == tmp_path / "weights", "relative to the file"
    assert [topology.successors(host) for host in topology.hosts] == [["tokyo.example:7701"], ["10.0.0.1:7701"]]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (HOSTS.replace("[2]", "[3]"), "no host begins with block 2, which must follow 'host-1'"),
        (HOSTS.replace("[2]", "[1, 2]").replace("[0, 1]", "[0, 1, 2]"), "no host ends with block 0, so 'tokyo' is"),
        (HOSTS.replace("[0, 1]", "[1, 0]"), "holds 1,0: give it consecutive blocks, in order"),
        (HOSTS.replace("[0, 1]", "[]"), "host 1: blocks must have at least one entry"),
        (HOSTS.replace("[2]", '["2"]'), "blocks must each be a whole number of at least 0"),
        (HOSTS.replace("listen", "lisen"), "host 2: unknown setting 'lisen'"),
        (HOSTS + 'device = "gpu"', r"host 2 \(tokyo\): device must be auto, cpu, cuda or cuda:N, not 'gpu'"),
        ("rooter = 1\n" + HOSTS, "unknown key 'rooter'"),
        ("[router]\nport = 1\n" + HOSTS, r"\[router\] has an unknown key 'port'; choose from listen"),
        (HOSTS.replace("10.0.0.1:7701", "10.0.0.1:0"), r"host 1 \(host-1\): address '10.0.0.1:0' has no port"),
        ('router = "x:1"\n' + HOSTS, r"\[router\] must be a table with listen, not 'x:1'"),
        (HOSTS.replace('"10.0.0.1:7701"', "5"), "host 1: address must be a string, not 5"),
        ("hosts = [1]", "host 1 must be a group of settings"),
        ("", r"there is no \[\[hosts\]\] entry"),
        ("hosts = []", "1 to 64 hosts, not 0"),
        (HOSTS.replace("10.0.0.1:7701", "10.0.0.1"), "address '10.0.0.1' must be HOST:PORT"),
        (HOSTS.replace('address = "10.0.0.1:7701"', ""), "host 1: address is missing"),
        (HOSTS.replace("10.0.0.1:7701", "tokyo.example:7701"), "two hosts have the address"),
        (HOSTS.replace('tokyo"', 'host-1"'), "two hosts have the name 'host-1'"),
        (HOSTS.replace('tokyo"', '../tokyo"'), "must be 1 to 64 letters, digits"),
        (HOSTS.replace('tokyo"', 'router"'), "cannot be called 'router'"),
        ("hosts = [", "is not TOML"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path / "t.toml", text)
    with pytest.raises(ConfigError, match=says) as caught:
        read_topology(path)
    assert str(path) in str(caught.value)


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    for path, says in ((tmp_path / "none.toml", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError, match=f"cannot read the topology {path}: {says}"):
            read_topology(path)


def test_paths_must_be_absolute_outside_a_file() -> None:
    for text in (b'checkpoint = "weights"', b"[tls]", b'[tls]\ndirectory = "certs"'):
        with pytest.raises(ConfigError, match=r"etcd://x: .* '(weights|certs)' must be absolute"):
            parse_topology(text + HOSTS.encode(), "etcd://x")
    text = b'checkpoint = "/weights"\n[tls]\ndirectory = "/certs"' + HOSTS.encode()
    topology = parse_topology(text, "etcd://x")
    assert (topology.checkpoint, topology.certificates) == (Path("/weights"), Path("/certs"))


@given(name=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0/"), min_size=1, max_size=20))
def test_a_written_topology_is_read_back(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    topology = local_topology(2, 3, Path("/weights") / name)
    path = tmp_path_factory.mktemp("topology") / "t.toml"
    assert read_topology(write(path, topology.to_toml())) == topology


@pytest.mark.parametrize(
    ("hosts", "blocks", "spans"),
    [(1, 3, ["0,1,2"]), (2, 3, ["0,1", "2"]), (3, 3, ["0", "1", "2"]), (2, 4, ["0,1", "2,3"]), (1, 1, ["0"])],
)
def test_blocks_are_shared_out_in_order(hosts: int, blocks: int, spans: list[str]) -> None:
    topology = local_topology(hosts, blocks, Path("w"), first_port=9001)
    assert [host.span for host in topology.hosts] == spans
    assert topology.router == "127.0.0.1:9000"
    assert [host.address for host in topology.hosts] == [f"127.0.0.1:{9001 + i}" for i in range(hosts)]


def test_ports_must_not_exceed_65535() -> None:
    with pytest.raises(InputError, match="port 65533 leaves no room for 3 hosts"):
        local_topology(3, 3, Path("w"), first_port=65534)
    assert local_topology(3, 3, Path("w"), first_port=65533).hosts[-1].address.endswith(":65535")


def test_options_of_a_host_in_a_topology_are_checked(tmp_path: Path, bundles: Path, onesweep: Run) -> None:
    path = tmp_path / "topology.toml"
    path.write_text(local_topology(3, 3, bundles / "own", 7700).to_toml())
    for name in ("queue_limit", "batch", "lease_s", "hop_timeout_s", "--session-mb", "--threads"):
        given = (name, "0") if name.startswith("--") else ("--set", f"{name}=0")
        code, _, err = onesweep("host", "host-1", "--topology", path, *given)
        assert (code, f"{name} must be above 0, not 0" in err) == (2, True), err
    code, _, err = onesweep("host", "host-1", "--topology", path, "--device", "cuda:99")
    assert (code, "there is no device cuda:99 here" in err) == (2, True), err
    path.write_text(path.read_text() + 'device = "cuda:98"\n')
    for command in (("host", "host-3"), ("up",)):
        code, _, err = onesweep(*command, "--topology", path)
        assert (code, "there is no device cuda:98 here" in err) == (2, True), err
    code, _, err = onesweep("host", "host-1", "--topology", path, "--set", "prefix_mb=-1")
    assert (code, "prefix_mb must be at least 0, not -1" in err) == (2, True), err


def test_replicas_hold_the_same_blocks() -> None:
    topology = local_topology(2, 3, Path("w"), first_port=9001, replicas=2)
    assert [(host.name, host.span) for host in topology.hosts] == [
        ("host-1-1", "0,1"),
        ("host-1-2", "0,1"),
        ("host-2-1", "2"),
        ("host-2-2", "2"),
    ]
    assert topology.successors(topology.hosts[0]) == ["127.0.0.1:9003", "127.0.0.1:9004"]
    assert topology.successors(topology.hosts[3]) == ["127.0.0.1:9001", "127.0.0.1:9002"]
    assert topology.replicated == {host.name for host in topology.hosts}
    assert local_topology(2, 3, Path("w")).replicated == set()
    for replicas in (0, 40):
        with pytest.raises(InputError, match="replicas of 2 hosts: choose 1 to 32"):
            local_topology(2, 3, Path("w"), replicas=replicas)
