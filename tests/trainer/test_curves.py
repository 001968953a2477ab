from __future__ import annotations

import builtins
from pathlib import Path

import pytest

from trainer.curves import draw_curves
from trainer.log import StepLog


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    log = StepLog(tmp_path / "block-0.jsonl")
    for step in range(1, 6):
        log.append({"step": step, "next_byte_nats": 5 / step, "denoise_nats": 4 / step})
    log.append({"step": 5, "final": True, "valid_next_byte_nats": 1.1})
    with log.path.open("a") as file:
        file.write('{"step": 6, "next')
    return tmp_path


def test_a_picture_is_drawn(logged: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    path = draw_curves(logged)
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")
    assert not list(logged.glob(".curves*"))


def test_nothing_logged_is_an_empty_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    assert draw_curves(tmp_path) == tmp_path / "curves.png"


def test_without_matplotlib_it_says_what_to_install(
    logged: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert draw_curves(logged) is None
    assert "install onesweep[plots]" in capsys.readouterr().out
