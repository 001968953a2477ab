"""Flags and TOML keys made from a dataclass: valid values, and the sentence for a wrong one."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from stages.errors import ConfigError, InputError
from stages.settings import add_flags, check, flag, from_flags, from_toml, limits, read_toml


@dataclass(frozen=True)
class Lab:
    hosts: int = field(default=3, metadata=flag("hosts", minimum=1, maximum=64))
    rate_mbps: float | None = field(default=None, metadata=flag("of each link", above=0))


@dataclass(frozen=True)
class Load:
    checkpoint: Path = field(metadata=flag("bundle to serve", metavar="DIR"))
    users: int = field(default=8, metadata=flag("users at once", minimum=1))
    timeout_s: float = field(default=60.0, metadata=flag("deadline", above=0))
    modes: tuple[str, ...] = field(default=("ar",), metadata=flag("modes", metavar="M[,M]"))
    sizes: tuple[int, ...] = field(default=(1, 8), metadata=flag("sizes", minimum=1))
    codec: Literal["fp32", "int8"] = field(default="int8", metadata=flag("100 % of traffic"))
    html: Path | None = field(default=None, metadata=flag("write a report"))
    verify: bool = field(default=True, metadata=flag("accept any text"))
    names: tuple[str, ...] = field(default=(), metadata=flag("a name", name="--allow-host", action="append"))
    lab: Lab = field(default_factory=Lab)
    seed: int = field(default=0, metadata=limits(minimum=0))

    def __post_init__(self) -> None:
        check(self)


def parser_of(settings: type = Load) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="load")
    add_flags(parser, settings)
    return parser


def parsed(*arguments: str, base: Load | None = None, **values: object) -> Load:
    return from_flags(Load, parser_of().parse_args(["--checkpoint", "w", *arguments]), base, **values)


def test_every_flag_has_the_type_of_its_field() -> None:
    text = "--users 2 --timeout-s 1 --modes a,b --sizes 2,3 --codec fp32 --html r.html --no-verify --rate-mbps 5"
    assert parsed(*text.split(), "--allow-host", "x", "--allow-host", "y", seed=7) == Load(
        Path("w"), 2, 1.0, ("a", "b"), (2, 3), "fp32", Path("r.html"), False, ("x", "y"), Lab(3, 5.0), 7
    )


def test_only_flags_that_are_given_change_a_base() -> None:
    base = Load(Path("v"), users=3, verify=False, lab=Lab(5))
    assert parsed("--timeout-s", "2", base=base) == Load(Path("w"), users=3, timeout_s=2.0, verify=False, lab=Lab(5))


def test_help_shows_defaults_and_units() -> None:
    text = " ".join(parser_of().format_help().split())
    for words in ("--users N users at once (8)", "--timeout-s S deadline (60)", "sizes (1,8)", "modes (ar)"):
        assert words in text
    for words in ("100 % of traffic (int8)", "--html FILE write a report", "--no-verify accept any text"):
        assert words in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--users 0", "--users must be at least 1, not 0"),
        ("--timeout-s 0", "--timeout-s must be above 0, not 0.0"),
        ("--timeout-s inf", "--timeout-s must be above 0, not inf"),
        (f"--users {10**400}", f"--users must be at least 1, not {10**400}"),
        ("--hosts 65", "--hosts must be from 1 to 64, not 65"),
        ("--sizes 0", "sizes must each be a whole number of at least 1, not 0"),
    ],
)
def test_a_number_out_of_bounds_is_named_with_its_flag(arguments: str, sentence: str) -> None:
    with pytest.raises(InputError) as error:
        parsed(*arguments.split())
    assert str(error.value) == sentence


@pytest.mark.parametrize("arguments", ["--users x", "--sizes 1,x", "--codec int3", "--unknown"])
def test_an_invalid_value_ends_with_the_usage(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        parsed(*arguments.split())
    assert error.value.code == 2
    assert arguments.split()[0] in capsys.readouterr().err


def test_a_table_overrides_a_base() -> None:
    table = {"users": 4, "sizes": [2], "html": "r.html", "lab": {"rate_mbps": 1}, "verify": False}
    base = Load(Path("w"), timeout_s=5.0, lab=Lab(7))
    read = from_toml(Load, table, "load.toml", base)
    assert read == Load(Path("w"), 4, 5.0, sizes=(2,), html=Path("r.html"), lab=Lab(7, 1), verify=False)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (
            {"user": 1},
            "f: unknown setting 'user' (did you mean users?); available: checkpoint, codec, html, lab, modes, ",
        ),
        ({"users": 0}, "f: users must be a whole number of at least 1, not 0"),
        ({"users": True}, "f: users must be a whole number of at least 1, not true"),
        ({"timeout_s": 0}, "f: timeout_s must be a finite number above 0, not 0"),
        ({"timeout_s": float("inf")}, "f: timeout_s must be a finite number above 0, not inf"),
        ({"verify": 1}, "f: verify must be true or false, not 1"),
        ({"codec": "int3"}, "f: codec must be one of fp32, int8, not 'int3'"),
        ({"modes": "ar"}, "f: modes must be a list, each a string, not 'ar'"),
        ({"sizes": [1, 0]}, "f: sizes must each be a whole number of at least 1, not [1, 0]"),
        ({"checkpoint": 1}, "f: checkpoint must be a path, not 1"),
        ({"lab": 1}, "f: lab must be a section [lab]"),
        ({"lab": {"hosts": 65}}, "f [lab]: hosts must be a whole number from 1 to 64, not 65"),
        ({"seed": -1}, "f: seed must be a whole number of at least 0, not -1"),
        ({}, "f: checkpoint is missing"),
        ([], "f must be a group of settings, not []"),
    ],
)
def test_a_wrong_table_is_explained_with_the_place_and_the_valid_values(table: object, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_toml(Load, table, "f")
    assert str(error.value).startswith(sentence)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^cannot read the topology .*none.toml: No such file"):
        read_toml(tmp_path / "none.toml", "the topology")
    (tmp_path / "bad.toml").write_bytes(b'a = "caf\xe9"')
    with pytest.raises(ConfigError, match=r"bad.toml is not TOML: "):
        read_toml(tmp_path / "bad.toml")
    (tmp_path / "good.toml").write_bytes(b"\xef\xbb\xbf[a]\r\nb = 1")
    assert read_toml(tmp_path / "good.toml") == {"a": {"b": 1}}
