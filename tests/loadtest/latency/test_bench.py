"""`onesweep bench wan`: what is refused before a lab is made, and whole runs in a real one."""

import json
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.loadtest.conftest import check_refused
from tests.serving.pretrained import write_model

# Before a lab is made


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--profile", "atlantis"), "atlantis"),
        (("--profile", "lan,lan"), "--profile lists 'lan' twice"),
        (("--profile", "lan", "--modes", "swep"), "unknown mode 'swep' in --modes"),
        (("--profile", "lan", "--temperature", -1), "temperature must be from 0 to 100, not -1"),
        (
            ("--profile", "lan", "--bytes", 99999999),
            "a length of 99999999 leaves no room for a prompt in the context of",
        ),
        (("--profile", "lan", "--bytes", "many"), "--bytes 'many' must be positive integers, such as"),
        (("--profile", "lan", "--text", "new"), "--text: unknown value 'new'; choose from novel, copying"),
        (("--profile", "nat", "--hosts", 2), "'nat' names host-3, which a lab of 2 hosts does not have"),
        (("--profile", "lan", "--links", "reverse"), "--links: unknown value 'reverse' (did you mean reversed?)"),
        (("--profile", "lan", "--links", "reversed"), "--links needs a profile with links, and reversed at least 3"),
        (("--profile", "lan", "--hosts", 3), "3 hosts cannot share 2 blocks"),
        (("--profile", "lan", "--json", "/nowhere/r.json"), "cannot write /nowhere/r.json"),
    ],
)
def test_a_wrong_option_is_explained(
    bundle: Path, bench: Run, monkeypatch: pytest.MonkeyPatch, options: tuple[object, ...], says: str
) -> None:
    monkeypatch.setattr("loadtest.workload.testbed.temporary_lab", lambda *_: pytest.fail("a lab was made"))
    monkeypatch.setattr("loadtest.workload.testbed.lab_problem", lambda: "")
    sizes = () if {"--bytes", "--max-tokens"}.intersection(options) else ("--bytes", 8)
    check_refused(bench(bundle, *options, *sizes), says)


# On this machine


@pytest.mark.slow
def test_a_token_model_is_measured_without_a_lab(tmp_path: Path, bench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.workload.testbed.lab_problem", lambda: "there is no lab")
    write_model(tmp_path / "model")
    options = ("--profile", "loopback", "--modes", "ar,ar-speculative", "--max-tokens", 6, "--temperature", 1)
    files = ("--text", "novel", "--json", tmp_path / "r.json")
    ended = bench(tmp_path / "model", *options, *files, "--requests", 1, "--at-once", 2)
    loaded = json.loads((tmp_path / "r.json").read_text())
    for row in loaded["rows"]:
        assert (row["profile"], row["text"], row["length"], row["unit"]) == ("loopback", "novel", 6, "tokens")
        assert (row["requests"], row["failures"], row["tokens"]) == (2, 0, 6)
    _, guessed = loaded["rows"]
    assert (guessed["same_as_ar"], guessed["compared"]) == (2, 2)
    assert [sample["seed"] for sample in loaded["samples"]] == [0, 1, 0, 1]
    assert (ended.code, "2 of 2" in ended.out) == (0, True)


@pytest.mark.slow
def test_a_refused_request_is_a_row(bundle: Path, tmp_path: Path, bench: Run) -> None:
    options = ("--profile", "loopback", "--modes", "ar,local", "--bytes", 8, "--requests", 1)
    ended = bench(bundle, *options, "--json", tmp_path / "r.json")
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [(row["mode"], row["failures"]) for row in rows] == [("ar", 0), ("local", 1)]
    assert (ended.code, "local, 8 bytes: 1 of 1 failed, for example: " in ended.out) == (1, True)


# In a real lab


@pytest.mark.slow
def test_a_whole_run(needs_lab: None, bundle: Path, tmp_path: Path, bench: Run) -> None:
    options = ("--profile", "links-20", "--modes", "sweep,ar:fp32", "--bytes", "8", "--requests", 2)
    assert bench(bundle, *options, "--seed", 3, "--json", tmp_path / "r.json").code == 0
    record = json.loads((tmp_path / "r.json").read_text())
    assert [(r["profile"], r["mode"], r["requests"], r["failures"]) for r in record["rows"]] == [
        ("links-20", "sweep", 2, 0),
        ("links-20", "ar:fp32", 2, 0),
    ]
    for row in record["rows"]:
        assert row["sweeps"] == {"sweep": 1, "ar:fp32": 8}[row["mode"]]
        assert row["first_byte_ms"] <= row["p50_ms"] <= row["p95_ms"]
        assert row["ratio"] >= 1, "nothing beats the floor"
    assert (record["settings"]["seed"], record["settings"]["hosts"]) == (3, 2)
    assert {sample["seed"] for sample in record["samples"]} == {3, 4}


@pytest.mark.slow
def test_machines_that_join_use_the_requested_links(needs_lab: None, onesweep: Run) -> None:
    """Others than those would be an error."""
    options = ("--links", "reversed,relayed", "--modes", "ar", "--bytes", "8", "--requests", "1")
    ended = onesweep("bench", "wan", "--profile", "lan", *options)
    assert (ended.code, [row.split()[0] for row in ended.out.splitlines()[-2:]]) == (0, ["reversed", "relayed"])
