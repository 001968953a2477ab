"""The token that a command sends, and the files of secrets."""

import argparse
import errno
from pathlib import Path
from unittest.mock import Mock

import pytest

from stages.errors import InputError, exit_code_of
from stages.wire.secret_files import TOKEN_VARIABLE, add_token_options, state_directory, state_home, write_file
from stages.wire.tls import Tls
from stages.wire.tokens import token_of

HERE, AWAY = "127.0.0.1:7800", "10.8.0.9:7800"


def test_the_token_of_the_environment_is_not_sent_unencrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    parser = argparse.ArgumentParser()
    add_token_options(parser)
    options = parser.parse_args([])
    assert token_of(options, HERE, None) == "secret"
    assert token_of(options, AWAY, Tls(Path("ca.pem"))) == "secret"
    assert token_of(options, AWAY, None) == ""


def test_each_machine_has_its_own_state_in_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_STATE_HOME", "ONESWEEP_STATE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", Mock(side_effect=KeyError))
    with pytest.raises(InputError, match="no home directory: set HOME, or XDG_STATE_HOME to a directory"):
        state_home()
    assert state_directory().name.startswith("onesweep-")
    monkeypatch.setenv("HOME", str(tmp_path))
    here = state_directory()
    assert here.is_relative_to(state_home())
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert state_directory() == here.with_name("another")


def test_a_secret_that_cannot_be_written_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "replace", Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(InputError, match=r"cannot write .*: No space left") as caught:
        write_file(tmp_path / "token", b"secret")
    assert (exit_code_of(caught.value), [*tmp_path.iterdir()]) == (1, [])
