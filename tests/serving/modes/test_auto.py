"""`auto` over a real ring: it keeps its budget, names its choice, and writes the text of the chosen mode."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.cli.ports import free_port_block
from serving.client.client import Client, RequestRefused, Result
from serving.modes.auto import RESAMPLE_SKIPPED, choose
from serving.modes.frontier import Forecast, Frontier, Option
from serving.modes.tokenizer import ByteTokenizer
from serving.router.topology import local_topology
from stages.checkpoint.manifest import read_manifest
from tests.conftest import Run, until

NAMES = ("chain", "ar", "scorer", "local")


def option(mode: str, bits: float, sweeps: float = 1.0, host_ms: float = 5.0, **settings: Any) -> Option:
    return Option(mode, tuple(settings.items()), bits, 64, sweeps, sweeps, host_ms, 10.0, 9_000)


LOCAL = option("local", 3.0, 0, 0.0)
SWEEP = option("sweep", 2.8, steps=2)
CHUNKED = option("chunked", 2.7, 4, chunk=16, steps=2)
RESAMPLE = option("resample", 2.5, 4, scorer="ar", chunk=16, candidates=4)
WARM = option("resample", 2.4, 4, scorer="scorer", chunk=16, candidates=4, temperature=1.0)
AR = option("ar", 2.3, 64)
ALL = (LOCAL, SWEEP, CHUNKED, RESAMPLE, WARM, AR)


def write(path: Path, bundle: Path, options: tuple[Option, ...]) -> Path:
    weights = {name: read_manifest(bundle / name).digest() for name in NAMES}
    path.write_text(json.dumps(Frontier(options, weights, "judge").to_record()))
    return path


@pytest.fixture(scope="module")
def scored(bundles: Path) -> Path:
    return bundles / "scored"


@pytest.fixture(scope="module")
def whole(scored: Path, tmp_path_factory: pytest.TempPathFactory, local_ring: Any) -> Iterator[Client]:
    """A client of a ring whose router has all options."""
    path = write(tmp_path_factory.mktemp("frontiers") / "all.json", scored, ALL)
    with local_ring(scored, 2, frontier=path) as client:
        yield client


@pytest.fixture
def serve(scored: Path, tmp_path: Path, local_ring: Any) -> Iterator[Callable[..., Client]]:
    """A client of a host whose router has these options."""
    with contextlib.ExitStack() as opened:

        def start(options: tuple[Option, ...]) -> Client:
            path = write(tmp_path / f"{len(list(tmp_path.iterdir()))}.json", scored, options)
            return opened.enter_context(local_ring(scored, 1, frontier=path))

        yield start


def ask(client: Client, **settings: Any) -> Result:
    return client.generate("The sea ", **{"mode": "auto", "max_bytes": 64, "seed": 3, **settings})


def test_without_a_budget_the_best_mode_is_chosen(whole: Client) -> None:
    result = ask(whole)
    assert (result.mode, result.sweeps, result.output_bytes) == ("ar", 64, 64)
    assert result.reason.startswith("ar with 2.300 judge bits a byte has the best text of 6 settings; ")
    assert result.output == whole.generate("The sea ", mode="ar", max_bytes=64, seed=3).output


def test_the_settings_of_an_option_are_used(serve: Callable[..., Client]) -> None:
    client = serve((LOCAL, RESAMPLE))
    result = ask(client, budget_ms=60_000)
    assert (result.mode, result.scorer, result.chunk, result.candidates) == ("resample", "ar", 16, 4)
    assert "resample:ar:chunk=16:candidates=4 with 2.500 judge bits" in result.reason
    assert "the 2 of 2 settings that fit 60000 ms" in result.reason
    named = client.generate("The sea ", mode="resample", scorer="ar", chunk=16, candidates=4, max_bytes=64, seed=3)
    assert result.output == named.output
    warm = ask(serve((LOCAL, WARM)))
    named = client.generate("The sea ", mode="resample", max_bytes=64, seed=3, **dict(WARM.settings))
    assert warm.output == named.output


def test_after_the_loss_of_a_host_the_local_model_is_chosen(scored: Path, tmp_path: Path, servers: Any) -> None:
    topology = local_topology(2, 3, scored, free_port_block(3) + 1)
    hosts = servers.ring(topology, scored, frontier=write(tmp_path / "f.json", scored, ALL))
    with Client(topology.router) as client:
        assert ask(client).mode == "ar"
        hosts["host-2"].end()
        until(lambda: not client.status().ready)
        result = ask(client, budget_ms=30_000)
        assert (result.mode, result.sweeps) == ("local", 0)
        assert "hosts are left out: host host-2" in result.reason


# Mistakes of users


def refused(client: Client, **settings: Any) -> tuple[str, grpc.StatusCode]:
    with pytest.raises(RequestRefused) as error:
        ask(client, **settings)
    return str(error.value), error.value.code


def test_a_budget_that_is_too_small_is_refused(serve: Callable[..., Client], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteTokenizer, "noun", "tokens")  # as of other models
    says, code = refused(serve((LOCAL, CHUNKED, AR)), budget_ms=1)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "a budget of 1 ms is less than a sweep, which takes" in says
    slow = option("local", 3.0, 0, 0.0)
    says, code = refused(serve((Option(**{**vars(slow), "router_ms": 1e6}),)), budget_ms=5_000)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "too small for 64 bytes: the fastest setting, local, takes 1000000 ms now; give more time" in says
    says, _ = refused(serve((Option(**{**vars(slow), "router_ms": 1e6}),)), budget_ms=5_000, max_tokens=9)
    assert "too small for 9 tokens" in says


# Without a frontier


ORDER = "resample, ar-speculative, ar, chunked, sweep, local"


@pytest.fixture(scope="module")
def unguided(scored: Path, local_ring: Any) -> Iterator[Client]:
    with local_ring(scored, 1) as client:
        yield client


def test_without_a_frontier_the_first_served_mode_is_chosen(unguided: Client) -> None:
    result = unguided.generate("The sea ", max_bytes=64, seed=3)
    assert result.mode == "resample"
    assert result.reason.startswith(
        f"resample is the first of {ORDER} that these weights allow; the router has no frontier ("
    )
    assert result.output == ask(unguided, mode="resample").output
    assert RESAMPLE_SKIPPED not in result.reason
    assert "auto" in unguided.status().modes


def test_the_frontier_of_the_bundle_is_used_and_an_invalid_one_ignored(bundles: Path, tmp_path, local_ring) -> None:
    for name in NAMES:
        (tmp_path / name).symlink_to(bundles / "scored" / name)
    write(tmp_path / "frontier.json", bundles / "scored", (LOCAL,))
    with local_ring(tmp_path, 1) as client:
        assert ask(client).mode == "local"
        assert "auto" in client.status().modes
    (tmp_path / "frontier.json").write_text("{")
    with local_ring(tmp_path, 1) as client:
        assert client.generate("x", mode="sweep", max_bytes=4).output_bytes == 4
        assert "is not JSON" in ask(client).reason


def test_the_command_shows_the_chosen_mode_and_the_reason(serve: Callable[..., Client], onesweep: Run) -> None:
    client = serve((LOCAL, CHUNKED))
    arguments = ("The sea ", "--router", client.address, "--mode", "auto", "--max-bytes", 32, "--budget-ms", 30_000)
    code, _, err = onesweep("generate", *arguments)
    assert (code, "[chunked, seed 0" in err) == (0, True), err
    assert "[chunked:chunk=16:steps=2 with 2.700 judge bits a byte has the best text of the 2 of 2 settings" in err
    code, out, _ = onesweep("compare", "The sea ", *arguments[1:3], "--modes", "local,auto", "--budget-ms", 30_000)
    assert (code, "auto: chunked" in out) == (0, True), out


# Choices among forecasts made by hand.
def forecast(bits: float, ms: float, over: float = 1.0) -> Forecast:
    option = Option("ar-speculative", (), bits, 256, 10.0, 10.0 * over, 0.0, 0.0, 0.0)
    return Forecast(option, ms, ms * over, 10.0, ms / 10, 0.0)


forecasts = st.lists(
    st.builds(forecast, st.floats(0.5, 8.0), st.floats(0.1, 1e5), st.floats(1.0, 3.0)), min_size=1, max_size=12
)
budgets = st.floats(0.1, 3e5)


@given(forecasts, budgets)
def test_the_best_option_within_the_budget_is_chosen(made: list[Forecast], budget: float) -> None:
    choice = choose(made, budget)
    fitting = [f for f in made if f.high_ms <= budget]
    assert (choice is None) == (not fitting)
    if choice is not None:
        assert choice.picked.high_ms <= budget
        assert choice.picked.option.bits == min(f.option.bits for f in fitting)
        assert f"the {len(fitting)} of {len(made)} settings that fit" in choice.reason


@given(forecasts, budgets, budgets)
def test_a_larger_budget_gives_no_worse_text(made: list[Forecast], one: float, other: float) -> None:
    less, more = (choose(made, budget) for budget in sorted((one, other)))
    if less is not None:
        assert more.picked.option.bits <= less.picked.option.bits


def test_the_faster_of_two_equal_options_is_chosen_with_a_reason() -> None:
    choice: Any = choose([forecast(2.0, 300.0), forecast(2.0, 200.0)], None)
    assert choice.picked.ms == 200.0
    choice = choose([forecast(2.0, 900.0, 1.5), forecast(2.5, 200.0)], 1000.0)
    assert choice.reason == (
        "ar-speculative with 2.500 judge bits a byte has the best text of the 1 of 2 settings that fit 1000 ms; "
        "200 ms expected now: 10 sweeps of 20 ms and 0 ms of compute"
    )
