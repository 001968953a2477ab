"""Long work shows that it goes on, short work shows nothing."""

import io

import pytest

from stages import progress


@pytest.mark.parametrize(("tick_s", "shown"), [(0.001, "writing"), (60.0, "")])
def test_what_takes_long_says_so(tick_s: float, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(progress, "TICK_S", tick_s)
    with pytest.raises(KeyError), progress.ticking("writing"):  # noqa: PT012
        while shown not in stream.getvalue():
            pass
        raise KeyError
    assert stream.getvalue().strip() == shown
