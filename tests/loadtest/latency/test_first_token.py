"""Time to a first token: the floor in closed form, the prompt that is measured, and what the command says."""

import json
from pathlib import Path
from typing import Any

import pytest

from onesweep.loadtest.lab.profile import Link, profile_named
from onesweep.loadtest.latency import first_token as bench
from onesweep.loadtest.latency.commands import FirstTokenSettings
from onesweep.loadtest.latency.first_token import (
    Booked,
    PieceArm,
    PromptRequest,
    arms_of,
    floor_ms,
    prompt_for,
    shared_floor_ms,
)
from onesweep.loadtest.latency.interleave import Sample
from onesweep.loadtest.workload.texts import symbols_of
from onesweep.serving.cli.__main__ import main
from onesweep.serving.modes.tokenizer import BYTE_TOKENIZER
from onesweep.serving.router.settings import RouterSettings
from onesweep.serving.router.topology import local_topology
from onesweep.stages.errors import OnesweepError
from onesweep.stages.model.vocabulary import BYTES, Alphabet

D, C = 60.0, 100.0
LINKS = [Link(delay_ms=D, rate_mbps=8.0)] * 4  # 1000 bytes take 1 ms
FREE = [Link(delay_ms=D)] * 4


def booked(host_ms: float = C, size: int = 0, hosts: int = 3) -> Booked:
    return Booked((size,) * hosts + (0,), (host_ms,) * hosts)


@pytest.mark.parametrize("pieces", [1, 2, 8])
def test_pieces_of_one_size_leave_one_by_one(pieces: int) -> None:
    """Through three equal hosts: (3 + n - 1) C / n, and the delays."""
    shares = [1 / pieces] * pieces
    assert floor_ms(booked(), FREE, shares) == pytest.approx(4 * D + (3 + pieces - 1) * C / pieces)


def test_the_slowest_host_or_link_sets_the_pace() -> None:
    four = [0.25] * 4
    slow_host = Booked((0, 0, 0, 0), (40.0, 400.0, 40.0))
    assert floor_ms(slow_host, FREE, four) == pytest.approx(4 * D + 10 + 400 + 10)
    slow_link = Booked((0, 400_000, 0, 0), (40.0, 40.0, 40.0))
    assert floor_ms(slow_link, LINKS, four) == pytest.approx(4 * D + 10 + 400 + 10 + 10)


def test_in_one_hop_nothing_overlaps() -> None:
    assert floor_ms(booked(size=1000), LINKS, [1.0]) == pytest.approx(4 * D + 3 * C + 3)
    assert floor_ms(Booked((0, 0, 0, 5000), (C, C, C)), LINKS, [1.0]) == pytest.approx(4 * D + 3 * C + 5)


def test_shared_cores_compute_all_of_it() -> None:
    assert shared_floor_ms(booked(), FREE, 2) == pytest.approx(2 * D + 3 * C / 2)
    jitter = [Link(delay_ms=D, jitter_ms=10.0)] * 4
    assert shared_floor_ms(booked(), jitter, 1) == pytest.approx(2 * (D - 10) + 3 * C)


def test_shares_are_those_of_the_pieces() -> None:
    assert bench._shares(1000, BYTES, PieceArm("fp32", 16)) == [0.128] * 7 + [0.104]
    assert bench._shares(1000, Alphabet(50_000), PieceArm("fp32", 1)) == [1.0]


# What is measured


@pytest.fixture
def no_lab_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onesweep.loadtest.latency.first_token.lab_problem", lambda: "")


def test_a_prompt_has_the_length_asked_for(bundles: Path, tmp_path: Path, no_lab_needed: None) -> None:
    path = tmp_path / "text"
    path.write_text("é" + "The sea was calm. " * 20)
    for text in (None, path):
        settings = FirstTokenSettings(checkpoint=bundles / "own", prompt_symbols=301, text=text)
        prompt, alphabet = prompt_for(settings, profile_named("links-60"))
        assert (len(symbols_of(BYTE_TOKENIZER, prompt.encode())), alphabet) == (301, BYTES)


def answered(latency_ms: float) -> Sample:
    hosts = [{"compute_ms": 100.0}] * 3
    return Sample(0, 0, latency_ms, account={"wire_bytes": [1000, 1000, 1000, 100], "hosts": hosts})


def test_a_row_has_the_median_and_both_floors(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [answered(600.0), answered(700.0), Sample(0, error="gone"), answered(900.0)]
    row = bench._row(PieceArm("int8", 1), samples, list(FREE), [1.0])
    assert (row["p50_ms"], row["floor_ms"], row["host_s"], row["wire_bytes"]) == (700.0, 540.0, 0.3, 3100)
    assert row["ratio"] == pytest.approx(700 / 540)
    assert (row["requests"], row["failed"], row["error"], row["pieces"]) == (4, 1, "gone", 1)
    empty = bench._row(PieceArm("int8", 16), [Sample(0, error="gone")], list(FREE), [0.5, 0.5])
    table = bench.first_token_table([row, empty], [])
    assert "700" in table
    assert "int8, 2 pieces: gone" in table


def test_a_second_turn_has_a_table_of_its_own() -> None:
    told = {"prompt_tokens": 300, "cached_tokens": 256, "wire_bytes_total": 4000, **answered(0.0).booked}
    good = [Sample(0, 0, ms, account=told) for ms in (50.0, 90.0, 70.0)]
    row = bench._turn_row("from memory", [*good, Sample(0, error="gone")])
    assert (row["p50_ms"], row["cached_tokens"], row["wire_bytes"], row["failed"]) == (70.0, 256, 4000, 1)
    assert row["host_s"] == pytest.approx(0.3)
    table = bench.first_token_table([], [row, bench._turn_row("anew", [Sample(0, error="lost")])])
    assert "prompt tokens" in table
    assert "from memory: gone\nanew: lost" in table


def test_second_turns_go_on_from_the_first_and_apart(bundles: Path, no_lab_needed: None) -> None:
    settings = FirstTokenSettings(checkpoint=bundles / "own", prompt_symbols=200, requests=3)
    prompt, _ = prompt_for(settings, profile_named("links-60"))
    turns = bench.second_turns(settings, prompt)
    assert turns is not None
    assert len({each[: len(prompt) + 2] for each in turns.prompts}) == 5
    assert all(each.startswith(prompt) and 90 < len(each) - len(prompt) < 120 for each in turns.prompts)
    assert PromptRequest(turns.prompts, "int8").call(6, 1)["prompt"] == turns.prompts[1]
    longer = FirstTokenSettings(checkpoint=bundles / "own", prompt_symbols=400)
    assert bench.second_turns(longer, prompt) is None, "the context has no room"


@pytest.mark.parametrize(
    ("recalled", "anew", "sentence"),
    [
        ({"cached_tokens": 256, "output_hex": "aa"}, {"cached_tokens": 0, "output_hex": "ab"}, "is not the one that"),
        ({"cached_tokens": 0, "output_hex": "aa"}, {"cached_tokens": 0, "output_hex": "aa"}, "did not find the first"),
        ({"cached_tokens": 256, "output_hex": "aa"}, {"cached_tokens": 1, "output_hex": "aa"}, "one that must not did"),
        (None, {}, "the second turn failed: gone"),
    ],
)
def test_a_text_from_memory_must_be_the_same(
    monkeypatch: pytest.MonkeyPatch, recalled: dict[str, Any] | None, anew: dict[str, Any], sentence: str
) -> None:
    answers = [Sample(0, account=recalled, error="" if recalled else "gone"), Sample(0, account=anew)]
    monkeypatch.setattr(bench, "ask_once", lambda *_: answers.pop(0))
    with pytest.raises(OnesweepError, match=sentence):
        bench._check_second_turn(None, None, PromptRequest(("a",), ""))  # type: ignore[arg-type]


def test_the_second_router_sends_prompts_whole(bundles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[RouterSettings] = []
    monkeypatch.setattr(bench, "serve", served.append)
    monkeypatch.setattr(bench, "start_log", lambda *_: None)
    topology = tmp_path / "topology.toml"
    topology.write_text(local_topology(3, 3, bundles / "own", 7701).to_toml())
    bench.serve_plain(str(topology), "127.0.0.1:7777", "1")
    assert (served[0].ring.pieces, served[0].listen, served[0].checkpoint) == (1, "127.0.0.1:7777", bundles / "own")
    assert not served[0].ring.memory


def test_the_command_prints_and_writes(
    bundles: Path,
    tmp_path: Path,
    no_lab_needed: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measure(settings: FirstTokenSettings, *_: object) -> Any:
        return [bench._row(arm, [answered(700.0)], list(FREE), [1.0]) for arm in arms_of(settings)], []

    monkeypatch.setattr(bench, "measure_first_token", measure)
    path = tmp_path / "figures.json"
    command = ["bench", "first-token", "--checkpoint", bundles / "own", "--prompt-tokens", 200, "--json", path]
    assert main([str(word) for word in command]) == 0
    assert "x floor" in capsys.readouterr().out
    record = json.loads(path.read_text())
    assert [row["codec"] for row in record["rows"]] == ["fp32", "fp32", "int8", "int8"]
    assert record["prompt_symbols"] == 200


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--prompt-tokens", "128"], "--prompt-tokens must be 129 to 511, not 128"),
        (["--requests", "0"], "--requests must be at least 1"),
        (["--codec", "int4"], "unknown codec 'int4' (did you mean int8?); choose from fp32, int8"),
        (["--profile", "moon"], "no profile 'moon'"),
        (["--text", "/no/such/file"], "cannot read /no/such/file"),
    ],
)
def test_mistakes_end_in_a_sentence(
    bundles: Path, capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    base = ["bench", "first-token", "--checkpoint", str(bundles / "own"), "--prompt-tokens", "200"]
    assert main([*base, *options]) == 2
    assert sentence in capsys.readouterr().err
