"""Careless mistakes: a sentence with the remedy, the right exit code, no traceback."""

import errno
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from serving.cli.__main__ import main
from serving.cli.commands import Command, find
from serving.cli.deployment import Deployment
from serving.cli.parser import CHANGES, parse
from serving.cli.ports import free_port_block
from serving.cli.servers import MODULE
from serving.client.client import Client
from serving.router.topology import local_topology
from stages.errors import InputError
from tests.conftest import wait_ready
from tests.serving.harm import harm_with

SERVER_S = 60.0


@pytest.fixture(scope="module")
def words(bundles: Path, tmp_path_factory: pytest.TempPathFactory, module_servers: Any) -> Iterator[Any]:
    """Words for the commands below: a router with hosts, one without, one that wants tokens, files and ports."""
    folder = tmp_path_factory.mktemp("mistakes")
    ring = local_topology(1, 3, bundles / "own", free_port_block(2) + 1)
    module_servers.ring(ring, bundles / "own")
    lonely = local_topology(1, 3, bundles / "own", free_port_block(2) + 1)
    module_servers.router(lonely, None)
    (folder / "tokens.toml").touch(mode=0o600)
    run("token", "add", "ann", "--tokens", folder / "tokens.toml")
    guarded = local_topology(1, 3, bundles / "own", free_port_block(2) + 1)
    module_servers.router(guarded, None, tokens=folder / "tokens.toml")
    (folder / "ring.toml").write_text(ring.to_toml())
    (folder / "few.toml").write_text(local_topology(1, 2, bundles / "own", free_port_block(2) + 1).to_toml())
    (folder / "free.toml").write_text(lonely.to_toml())
    (folder / "gap.toml").write_text('[[hosts]]\naddress = "127.0.0.1:1"\nblocks = [0, 2]\n')
    (folder / "far.toml").write_text('[[hosts]]\naddress = "10.0.0.1:7701"\nblocks = [0, 1, 2]\n')
    (folder / "text.txt").write_text("The sea was calm.")
    (folder / "empty").mkdir()
    (folder / "full").mkdir()
    (folder / "full" / "notes.txt").touch()
    damaged = Path(shutil.copytree(bundles / "own", folder / "damaged"))
    harm_with("flipped", damaged)
    wait_ready(ring.router)
    with socket.create_server(("127.0.0.1", 0)) as taken, Client(lonely.router) as client:
        (folder / "taken.toml").write_text(local_topology(1, 3, bundles / "own", taken.getsockname()[1]).to_toml())
        while not client.status().hosts[0].reason:
            pass
        yield {
            "ring": ring.router,
            "lonely": lonely.router,
            "guarded": guarded.router,
            "host": ring.hosts[0].address,
            "closed": f"127.0.0.1:{free_port_block(1)}",
            "taken": f"127.0.0.1:{taken.getsockname()[1]}",
            "port": taken.getsockname()[1] - 1,
            "weights": bundles / "own",
            "damaged": damaged,
            "tmp": folder,
            "empty": "",
        }


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *MODULE, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=SERVER_S,
        stdin=subprocess.DEVNULL,
        env=os.environ | environment,
        check=False,
    )


TYPING = [
    ("generat x", 2, "unknown command 'generat'; did you mean `onesweep generate`?"),
    ("chaos --minutes 1", 2, "did you mean `onesweep bench chaos`?"),
    ("restart", 2, "unknown command 'restart'; `onesweep --help` lists them"),
    ("start", 2, "unknown command 'start'; did you mean `onesweep up`?"),
    ("bench peers", 2, "--checkpoint, --source are missing"),
    ("train pictures blocks --data x", 2, "'blocks' is not one of chain, steps, local (CHANGELOG.md says what to use"),
    ("generate x --mode verified", 2, "unknown mode 'verified' (CHANGELOG.md says what to use now); choose from"),
    ("up --http 1:99999", 2, "--http '1:99999' must be HOST:PORT, with a port from 0 to 65535"),
    ("--verison", 2, "no option --verison (did you mean --version?)"),
    ("down --port 1", 2, "no option --port; see `onesweep down --help`"),
    ("generate x --set codec", 2, "--set codec has no value: give --set codec=VALUE"),
    ("compare x --modes ar:codec=", 2, "--modes 'ar:codec=': codec has no value: give codec=VALUE"),
    (f"generate x --mode {'m' * 10_000}", 2, f"unknown mode '{'m' * 40}…'; choose from sweep"),
    ("generate x --top-p 1", 2, "no option --top-p: give --set top_p=VALUE; see `onesweep generate --help`"),
    ("generate x --max-byte 5", 2, "no option --max-byte (did you mean --max-bytes?)"),
    ("generate The sea", 2, "unexpected 'sea': put text with spaces in quotes"),
    ("generate", 2, "PROMPT is missing"),
    ("generate -", 2, "standard input is not UTF-8 (byte 0): give UTF-8 text"),
    ("generate -hello", 2, "write -- before a text, ./ before a file"),
    ("generate x --max-bytes ten", 2, "--max-bytes must be a whole number, not 'ten'"),
    ("generate x --max-bytes -5", 2, "max_bytes must be a whole number from 1"),
    ("draw sneaker --guidance much --out x.png", 2, "--guidance must be a number, not 'much'"),
    ("up --hosts 2 --topology t.toml", 2, "cannot be used together"),
    ("deploy weights --rollback", 2, "give either a checkpoint directory, to deploy it, or --rollback"),
    ("deploy --rollback --without a", 2, "--without is for a deployment"),
    ("generate -h=x", 2, "-h takes no value"),
    ("generate x --mode ar -- -y", 2, "unexpected '-y': put text with spaces in quotes"),
    ("up --port 99999", 2, "--port must be at most 65535, not 99999"),
]
BENCHES = [
    ("bench host --batch 65", 2, "--batch must be from 1 to 64, not 65"),
    ("bench host --levels 12", 2, "--levels has no effect on"),
    ("bench host --max-tokens 500", 2, "--max-tokens must be 1 to 469 to fit the context, not 500"),
    ("bench chaos --checkpoint /nowhere", 2, "/nowhere"),
    ("bench chaos --simulate --minutes 10", 2, "--simulate accepts only --seed and --schedules"),
    ("bench chaos --schedules 1000", 2, "--schedules needs --simulate"),
]
FILES = [
    ("up --checkpoint /nowhere", 2, "no checkpoint in /nowhere"),
    ("up --checkpoint {damaged} --port {port}", 1, "in use"),
    ("up --checkpoint {weights} --topology {tmp}/far.toml", 1, "listens on 10.0.0.1:7701, which is not loopback"),
    ("up --checkpoint {weights} --hosts 0", 2, "--hosts must be above 0"),
    ("up --checkpoint {weights} --tokens /nowhere", 2, "cannot read /nowhere"),
    ("host nam --topology {tmp}/ring.toml", 2, "no host 'nam'"),
    ("doctor --topology {tmp}/gap.toml", 2, "consecutive blocks, in order"),
    ("up --checkpoint=", 2, "--checkpoint: the name of a file or directory is empty"),
    ("router --topology {tmp}/few.toml --checkpoint {weights}", 2, "is 2 in the topology, but 3 in {weights}: make"),
    ("up --topology etcd://127.0.0.1:1/x", 2, "this command takes a topology from a file only"),
    ("doctor --topology http://127.0.0.1:1/x", 2, "must be a file, or etcd://HOST:PORT"),
    ("host host-1 --topology {tmp}/taken.toml --checkpoint {weights}", 1, "the port is in use"),
    ("host host-1 --topology {tmp}/free.toml --checkpoint {damaged}", 1, "damaged"),
    ("import /nowhere.gguf --out {tmp}/new", 2, "/nowhere.gguf does not exist: give a Hugging Face folder or a .gguf"),
    ("inspect {tmp}/text.txt", 2, "text.txt is a file: `onesweep import {tmp}/text.txt --out DIR` reads models"),
    ("inspect {weights}/ar/manifest.json", 2, "manifest.json is a file: give its directory, {weights}/ar"),
    ("import {tmp}/empty --out {tmp}/full", 2, "full"),
    ("token add bob --tokens {tmp}/tokens.toml --scope genrate", 2, "did you mean generate?"),
]
SERVERS = [
    ("down", 1, "nothing is up"),
    ("doctor", 1, "name the hosts with --topology"),
    ("generate x --router {closed}", 1, "no router answers at {closed}; start one there"),
    ("generate x --router {host}", 1, "{host} is not a router; give the router's address"),
    ("generate x --router {taken} --timeout-s 0.1", 1, "no answer from {taken} in 0.1 s: the router's machine"),
    ("generate x --router no-such-host.invalid:7700 --insecure", 1, "no-such-host.invalid:7700"),
    ("generate x --router {guarded}", 2, "token"),
    ("generate --router {lonely} --wait 0 --timeout-s 30 -- -hello", 1, "check that it runs"),
    ("compare x --router {lonely} --wait 0", 1, "cannot compare modes, the router is not ready"),
    ("compare {empty} --router {closed}", 2, "the prompt is empty: give at least one byte of text"),
    ("compare x --router {lonely} --modes local", 2, "the router has no local model"),
    ("chat x --router {lonely} --mode local", 2, "the router serves no mode that can answer"),
    ("chat x --router {closed} --temperature -1", 2, "temperature must be from 0 to"),
    ("chat {empty} --router {closed}", 2, "the prompt is empty: give some text"),
    ("chat x --router {closed} --mode are", 2, "unknown mode 'are' (did you mean ar"),
    ("chat x --router {closed} --max-tokens 0", 2, "--max-tokens must be at least 1, not 0"),
    ("chat x --router {ring} --max-tokens 9000", 2, "shorten one of them"),
    ("generate x --router {ring} --mode ar --budget-ms 9", 2, "mode ar does not take budget_ms: leave it out, or"),
    ("http --router {ring} --listen {taken}", 1, "{taken}: Address already in use; give another --listen"),
    ("draw sneaker --compare --out x.png --router {ring}", 2, "the router at {ring} serves no model that draws"),
    ("train status {closed} --once --patience 0", 1, "no coordinator answers at {closed}"),
]


@pytest.mark.parametrize(
    ("line", "code", "says"), TYPING + BENCHES + FILES + SERVERS, ids=lambda value: str(value)[:40]
)
def test_a_mistake_is_explained_in_one_sentence(
    words: dict[str, Any],
    line: str,
    code: int,
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), errors="replace"))
    assert main([word.format(**words) for word in line.split()]) == code
    out, err = capsys.readouterr()
    (sentence,) = err.splitlines()[-1:]
    assert sentence.startswith("onesweep")
    assert says.format(**words) in sentence
    assert (out, "done" in err) == ("", False)


def test_a_dead_deployment_is_reported_only_if_no_router_answers(
    words: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dead = Mock(**{"ended.return_value": {"router": "killed"}, "topology.client_tls": None})
    monkeypatch.setattr("serving.cli.deployment.deployment_here", lambda router: dead)
    assert main(["generate", "x", "--max-bytes", "2", "--router", words["ring"]]) == 0
    for command in (["generate", "x"], ["status"], ["deploy", "--rollback"]):
        assert main([*command, "--router", words["closed"]]) == 1
        assert "exited: killed; `onesweep down`" in capsys.readouterr().err


def test_unwritable_output_is_an_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for line in ("wan --help", "--version", "generate --help"):
        with open("/dev/full", "w") as full, monkeypatch.context() as changed:
            changed.setattr("sys.stdout", full)
            assert main(line.split()) == 1
        assert capsys.readouterr().err == "onesweep: cannot write the output: No space left on device\n"
    monkeypatch.setattr("sys.stdout", ascii_only := io.TextIOWrapper(io.BytesIO(), "ascii"))
    monkeypatch.setattr("serving.cli.__main__._run", lambda words: print("a⏎", file=sys.stdout) or 0)
    for name in ("stdin", "stderr"):
        monkeypatch.setattr(f"sys.{name}", None)  # closed
    assert (main([]), ascii_only.buffer.getvalue(), sys.stdin.read(), sys.stderr.read()) == (0, b"a?\n", "", "")


def test_a_disk_error_exits_with_1(
    bundles: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_bytes", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    assert main(["deploy", "--router", "127.0.0.1:1", str(bundles / "own")]) == 1
    assert "Input/output error" in capsys.readouterr().err


def test_servers_stop_although_stderr_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = Mock()
    monkeypatch.setattr(Deployment, "stop", stopped)
    monkeypatch.setattr("sys.stderr", Mock(**{"isatty.return_value": False, "write.side_effect": BrokenPipeError}))
    Deployment(local_topology(1, 1, tmp_path), tmp_path, {}).stop_visibly()
    assert stopped.called


def test_whatever_the_machine_lacks_is_explained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, cuda = "DefaultCPUAllocator: can't allocate memory", "CUDA out of memory. Tried to allocate 2.00 GiB"
    package, other = ModuleNotFoundError(name="cryptography"), PermissionError(13, "Permission denied", "/root/x")
    mapped = ImportError("libtorch_cpu.so: failed to map segment from shared object")
    thread, fork = RuntimeError("can't start new thread"), BlockingIOError(11, "Resource temporarily unavailable")
    file = OSError(24, "Too many open files", "/root/x")
    others = {package: "this command needs cryptography", other: "cannot use /root/x: Permission denied"}
    others[OSError(errno.ELOOP, "Too many levels", "x/y")] = "cannot use x/y: Too many levels"
    others[FileNotFoundError(2, "No usable directory")] = "No usable directory: make one of them writable"
    for error in (MemoryError(), mapped, RuntimeError(cpu), RuntimeError(cuda), thread, fork, file, *others):
        monkeypatch.setattr("serving.cli.__main__.parse", Mock(side_effect=error))
        assert main(["up"]) == (2 if error in others else 1)
        says = others.get(error, "a limit of the system is reached (")
        assert capsys.readouterr().err.startswith(f"onesweep: {says}")


def test_options_and_texts_are_accepted_in_any_order() -> None:
    for line in ("run m --max-tokens 8 hi", "run --max-tokens 8 m hi", "run m hi --max-tokens 8"):
        options = parse(line.split())
        assert (str(options.model), options.max_tokens, options.prompt) == ("m", 8, "hi")
    for line in ("draw boot --out x bag", "draw boot --out x -- bag", "draw boot bag --out x --"):
        assert parse(line.split()).classes == ["boot", "bag"]


def test_every_removed_command_and_option_has_a_hint() -> None:
    rows = re.findall(r"^\| (.+?) \| ", CHANGES.read_text(), re.MULTILINE)
    hints = re.compile(r"CHANGELOG\.md says|give --set|the command comes first")
    tried = 0
    for row in rows:
        spans, commands = re.findall(r"`([a-z][a-z -]*|--[a-z].*?)`", row), re.sub("[^;]* of `[^;]*", "", row)
        there = [" ".join(path[1:]) for path, node, _ in map(find, map(str.split, spans)) if isinstance(node, Command)]
        for span in spans:
            lines = [span] * (f"`{span}`" in commands)
            if span.startswith("--"):
                lines = [f"{command} {span}" for command in there or ["train text"]]
            for line in lines:
                with pytest.raises(InputError) as refusal:
                    parse([*line.split(), "--no-such"])
                message = str(refusal.value)
                if re.search("no option (?!--no-such)|unknown command", message):
                    assert hints.search(message), line
                    tried += 1
    assert tried > 200


@pytest.mark.parametrize(("line", "code"), [("generat x", 2), ("status --router 127.1:1 --insecure", 1)])
def test_the_process_exits_with_the_code_and_the_sentence(line: str, code: int) -> None:
    ended = run(*line.split())
    assert (ended.returncode, ended.stdout) == (code, "")
    assert ended.stderr.splitlines()[-1].startswith("onesweep")
    assert not re.search("Traceback|does not resolve", ended.stderr)  # the system knows what 127.1 means


def test_ctrl_c_ends_a_command_that_waits_for_an_answer() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        subprocess.Popen(
            [sys.executable, *MODULE, "generate", "x", "--router", f"127.0.0.1:{silent.getsockname()[1]}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as command,
    ):
        connection, _ = silent.accept()  # it waits for an answer now
        with connection:
            command.send_signal(signal.SIGINT)
            out, err = command.communicate(timeout=SERVER_S)
    assert (command.returncode, out, err) == (130, b"", b"")


@pytest.mark.parametrize(
    ("library", "arguments", "extra"),
    [
        ("cryptography", ["certs", "init"], "tls"),
        ("fastapi", ["http"], "http"),
        ("etcd3gw", ["doctor", "--topology", "etcd://127.0.0.1:1/x"], "etcd"),
    ],
)
def test_a_missing_extra_is_named(library: str, arguments: list[str], extra: str) -> None:
    hidden = f"import sys; sys.modules[{library!r}] = None; from serving.cli.__main__ import main; sys.exit(main())"
    ended = subprocess.run(
        [sys.executable, "-c", hidden, *arguments], capture_output=True, text=True, timeout=SERVER_S, check=False
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert f"pip install 'onesweep[{extra}]'" in ended.stderr
    assert ended.stderr.count("\n") == 1
