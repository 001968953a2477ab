"""Tokens: the file, access, and the commands."""

import logging
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from stages.errors import InputError
from stages.wire.secret_files import file_lock
from stages.wire.status import StatusError
from stages.wire.tokens import ANONYMOUS, Key, Keyring, new_token, read_tokens, token_hash, token_metadata, write_tokens
from tests.conftest import Run, refused

DIGEST = "0" * 64
ALICE = Key("alice", DIGEST, ("generate",), 2.5, 3, 1000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens.toml"


def test_a_file_is_read_as_it_was_written(path: Path) -> None:
    keys = (ALICE, Key("bob", "1" * 64))
    write_tokens(path, keys)
    assert read_tokens(path) == keys
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        (None, "a token is required: .* or send Authorization: Bearer TOKEN"),
        ((("user-agent", "x"),), "a token is required"),
        ((("authorization", "Basic abc"),), "the metadata `authorization` must be `Bearer TOKEN`"),
        ((("authorization", "Bearer onesweep_x"),), "unknown token"),
        ((("authorization", "Bearer "),), "unknown token"),
        ((("authorization", b"Bearer \xff"),), "unknown token"),
        ((("authorization", "Bearer \udcff"),), "unknown token"),
    ],
)
def test_an_unknown_token_is_refused(
    path: Path, metadata: tuple[tuple[str, str | bytes], ...] | None, says: str
) -> None:
    write_tokens(path, [ALICE])
    with refused(grpc.StatusCode.UNAUTHENTICATED, says):
        Keyring(path).identify(metadata, "generate")


def test_each_token_has_its_own_cache_namespace() -> None:
    spaces = [replace(ALICE, sha256=token_hash(new_token())).space("paris") for _ in range(2)]
    spaces += [ANONYMOUS.space(router) for router in ("", "paris")]
    assert len({*spaces, ALICE.space("")}) == 5
    assert {len(space) for space in spaces} == {16}
    assert ALICE.space("") == replace(ALICE, name="alice2").space("paris"), "at any router, after any restart"


def test_a_changed_file_is_read_again(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    token = new_token()
    write_tokens(path, [replace(ALICE, sha256=token_hash(token))])
    keyring = Keyring(path)
    path.write_text("broken")
    assert keyring.identify(token_metadata(token), "generate").name == "alice", "a mistake in the file locks no key out"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    write_tokens(path, [])
    with pytest.raises(StatusError, match="unknown token"):
        keyring.identify(token_metadata(token), "generate")
    assert "tokens.toml has no keys: no one has access" in caplog.text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1", r"it must have only \[\[keys\]\] sections"),
        ("keys = [3]", "key 3 must be a group of settings"),
        ("[[keys]]\nname = 'a'\nscopes = ['status']", "key 'a' needs the sha256 of its token"),
        (f"[[keys]]\nsha256 = '{DIGEST}'\nscopes = ['status']", "name is missing"),
        (f"[[keys]]\nname = 'a'\nsha256 = '{DIGEST}'", "key a has no scope"),
        (f"[[keys]]\nname = 'a'\nsha256 = '{DIGEST}'\ncolour = 1", "unknown setting 'colour'"),
        (f"[[keys]]\nname = 'a'\nsha256 = '{DIGEST}'\nrate = 'x'", "rate must be a finite number, not 'x'"),
        (f"[[keys]]\nname = 'a'\nsha256 = '{DIGEST[1:]}é'\nscopes = ['admin']", "64 hex digits"),
    ],
)
def test_an_invalid_file_is_explained(path: Path, text: str, says: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    with pytest.raises(InputError, match=rf"tokens\.toml.*{says}"):
        Keyring(path)


@pytest.mark.skipif(os.getuid() != 0, reason="files are given away by root only")
@pytest.mark.parametrize(("before", "after"), [(0o640, 0o640), (0o600, 0o600), (0o777, 0o640)])
def test_a_rewritten_file_keeps_its_owner_and_permissions(path: Path, before: int, after: int) -> None:
    write_tokens(path, [ALICE])
    os.chown(path, 1, 2)
    path.chmod(before)
    write_tokens(path, [])
    status = path.stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (1, 2, after)


def test_one_command_at_a_time_changes_the_file(path: Path) -> None:
    command = [sys.executable, "-P", "-m", "serving.cli", "token", "add", "bob", "--tokens", str(path)]
    with file_lock(path):
        adding = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        with pytest.raises(subprocess.TimeoutExpired):
            adding.wait(3)
        write_tokens(path, [ALICE])
    assert adding.wait(60) == 0
    assert [key.name for key in read_tokens(path)] == ["alice", "bob"]


@pytest.mark.parametrize("token", ["é", "a b", "a\nb"])
def test_a_token_with_invalid_characters_is_refused(token: str) -> None:
    with pytest.raises(InputError, match="the token has invalid characters"):
        token_metadata(token)


def test_the_commands_add_list_and_remove_keys(onesweep: Run, path: Path) -> None:
    limits = ("--rate", 2, "--concurrent", 3, "--bytes-per-day", 1000)
    code, out, _ = onesweep("token", "add", "alice", "--scope", "generate", *limits, "--tokens", path)
    token = out.strip()
    assert (code, token[:9], len(token), token in path.read_text()) == (0, "onesweep_", 52, False)
    out = path.with_name("bob.token")
    assert onesweep("token", "add", "bob", "--tokens", path, "--out", out)[0] == 0
    assert (out.read_text()[:9], out.stat().st_mode & 0o777) == ("onesweep_", 0o600)
    assert onesweep("token", "add", "eve", "--tokens", path, "--out", out)[0] == 2, "bob's would be lost"
    alice, bob = onesweep("token", "list", "--tokens", path)[1].splitlines()
    assert alice.split(maxsplit=2) == ["alice", "generate", "2 requests/s, 3 concurrent, 1000 bytes/day"]
    assert bob.split(maxsplit=2) == ["bob", "generate,status", "no limits"]
    assert Keyring(path).identify(token_metadata(token), "generate").concurrent == 3
    assert onesweep("token", "remove", "alice", "--tokens", path)[1] == "removed alice; 1 left\n"
    with pytest.raises(StatusError, match="unknown token"):
        Keyring(path).identify(token_metadata(token), "generate")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["add", "alice"], "already has a key alice"),
        (["add", "a b"], "key name 'a b' must be"),
        (["add", "bob", "--scope", "fly"], "key bob: unknown scope 'fly'; choose from generate, status, work, admin"),
        (["add", "bob", "--scope", ","], "key bob has no scope"),
        (["add", "bob", "--rate", "0"], "key bob: rate must be above 0, not 0.0"),
        (["add", "bob", "--rate", "nan"], "key bob: rate must be above 0, not nan"),
        (["add", "bob", "--concurrent", "0"], "key bob: concurrent must be 1 or more for each router, not 0"),
        (["add", "bob", "--bytes-per-day", "-1"], "key bob: bytes_per_day must be 1 or more for each router, not -1"),
        (["remove", "bob"], "has no key 'bob'; it has: alice"),
    ],
)
def test_a_wrong_argument_is_explained(onesweep: Run, path: Path, arguments: list[str], says: str) -> None:
    onesweep("token", "add", "alice", "--tokens", path)
    code, out, err = onesweep("token", *arguments, "--tokens", path)
    assert (code, out) == (2, "")
    assert says in err
