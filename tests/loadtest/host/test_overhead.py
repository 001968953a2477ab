"""`onesweep bench overhead`: its figures are there and add up; nothing here asserts how fast anything is."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from onesweep.loadtest.host.benchmark import TextDiffers
from onesweep.loadtest.host.overhead import OverheadBench, OverheadFigures, OverheadSample, check_text, figures_of
from onesweep.loadtest.host.settings import OverheadSettings
from onesweep.loadtest.workload.pipeline import InProcess, Work
from onesweep.serving.cli.__main__ import main
from onesweep.serving.client.client import Result
from onesweep.stages.errors import InputError

WORK = Work("sweep", b"prompt", 4, 0)
SERVED = Result("text", "sweep", 0, 6, 4, 6, 4, False, 1, 2, [], 0, 1.0, 1.0, 1.0, [], 0, 0, 0, b"text")
SAMPLES = [OverheadSample(10.0 + i, 9.0, 4.0, 5.0, 2) for i in range(20)]
TABLE = OverheadBench(OverheadSettings()).table


def test_a_whole_run(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    command = ["bench", "overhead", "--checkpoint", str(bundle), "--requests", "2", "--bytes", "8", "--hosts", "2"]
    assert main([*command, "--json", str(path)]) == 0
    table = capsys.readouterr().out
    record = json.loads(path.read_text())
    assert (record["bench"], record["requests"], record["max_bytes"]) == ("overhead", 2, 8)
    assert [(f["mode"], f["hosts"], f["sweeps"]) for f in record["figures"]] == [
        ("sweep", 2, 1),
        ("chunked", 2, 1),
        ("ar", 2, 8),
    ]
    for figures in record["figures"]:
        assert OverheadFigures(**figures).requests == 2
        assert 0 < figures["compute_ms"] <= figures["router_p50_ms"] <= figures["latency_p95_ms"]
        assert f"{figures['overhead_ms_per_sweep']:,.2f}" in table


def test_figures_are_medians_and_the_overhead_is_one_sweep_s_share() -> None:
    figures = figures_of("sweep", 3, SAMPLES)
    assert (figures.latency_p50_ms, figures.latency_p95_ms) == (19.5, 28.0)
    assert figures.overhead_ms_per_sweep == pytest.approx((19.5 - 4) / 2)
    assert figures.latency_to_compute == pytest.approx(19.5 / 4)
    assert figures.latency_to_in_process == pytest.approx(19.5 / 5)


def test_one_request_is_its_own_percentile() -> None:
    assert figures_of("ar", 3, SAMPLES[:1]).latency_p95_ms == 10.0


@pytest.mark.parametrize(("latency_ms", "met"), [(9.0, True), (9.1, False)])
def test_the_target_of_a_ring_of_three(latency_ms: float, met: bool) -> None:
    samples = [replace(SAMPLES[0], latency_ms=latency_ms)]  # 4 ms of compute and 2 sweeps: 2.5 ms a sweep
    figures = figures_of("ar", 3, samples)
    assert (figures.target_ms_per_sweep, figures.met) == (2.5, met)
    assert TABLE([figures]).splitlines()[2].split()[7:9] == ["2.5", "yes" if met else "no"]


def test_no_target_for_other_rings() -> None:
    figures = figures_of("ar", 1, SAMPLES)
    assert (figures.target_ms_per_sweep, figures.met) == (None, None)
    assert TABLE([figures]).splitlines()[2].split()[7:9] == ["-", "-"]


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    lines = (
        OverheadBench(OverheadSettings())
        .table([figures_of("sweep", 3, SAMPLES), figures_of("chunked", 1, SAMPLES)])
        .splitlines()
    )
    assert len({len(line) for line in lines}) == 1


def test_a_text_that_serving_changed_is_an_error_with_both() -> None:
    check_text(WORK, SERVED, b"text")
    with pytest.raises(TextDiffers, match=r"(?s)sweep, seed 0.*b'text'.*b'Text'"):
        check_text(WORK, SERVED, b"Text")


@pytest.mark.parametrize("mode", ["sweep", "chunked", "ar"])
def test_the_floor_gives_as_many_bytes_as_asked_and_the_same_again(bundle: Path, mode: str) -> None:
    floor = InProcess(bundle)
    first, again, other = (floor.generate(Work(mode, b"prompt", 40, seed)) for seed in (1, 1, 2))
    assert len(first) == 40
    assert first == again != other


@pytest.mark.parametrize("change", [{"max_bytes": 0}, {"max_bytes": 54}, {"hosts": (3,)}])
def test_settings_are_refused_before_anything_starts(bundle: Path, change: dict[str, object]) -> None:
    settings = OverheadSettings(bundle, 1, 53)  # 43 bytes of prompt and 53 fill the context
    assert [len(topology.hosts) for topology in OverheadBench(settings).rings()] == [1, 2]
    with pytest.raises(InputError):
        OverheadBench(replace(settings, **change)).check()
