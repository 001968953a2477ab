"""Long work shows its progress, short work shows nothing."""

import io

import pytest

from stages import progress


@pytest.mark.parametrize(("tick_s", "shown"), [(0.001, "writing"), (60.0, "")])
def test_only_long_work_shows_progress(tick_s: float, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(progress, "TICK_S", tick_s)
    with pytest.raises(KeyError), progress.ticking("writing"):  # noqa: PT012
        while shown not in stream.getvalue():
            pass
        raise KeyError
    assert stream.getvalue().strip() == shown


def test_the_remaining_time_is_estimated_from_the_start_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, times = io.StringIO(), iter((0.0, 100.0, 110.0, 120.0, 130.0))
    stream.isatty = lambda: True  # of a terminal that cannot erase a line
    monkeypatch.setenv("TERM", "dumb")
    line = progress.ProgressLine(stream, lambda: next(times))
    line.at("waiting")
    for share in (0.0, 0.5, 0.75):
        line.at("importing", share)
    assert "importing, 50% done, about 10 s left\n" in stream.getvalue()


def test_the_shown_seconds_are_those_of_the_current_step() -> None:
    stream, times = io.StringIO(), iter((0.0, 0.0, 5.0, 60.0, 75.0, 80.0, 90.0))
    line = progress.ProgressLine(stream, lambda: next(times))
    for step in ("waiting for machines: none", "waiting for machines: 1 of 2", *["starting"] * 4):
        line.at(step)
    assert stream.getvalue().splitlines()[-2:] == ["starting (15 s)", "starting (30 s)"], "less and less often"
