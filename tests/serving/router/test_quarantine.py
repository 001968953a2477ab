"""The quarantine of faulty hosts: its length, and restarts."""

import time
from pathlib import Path

import pytest

from serving.router.audit import Quarantine
from stages import clock
from stages.host.prefixes import MAX_FAULTY


def test_each_finding_doubles_the_time_without_work() -> None:
    found = Quarantine()
    assert found.of("a") == ("", 0.0)
    assert [found.add("a", "it lies", "a/1") for _ in range(7)] == [1, 2, 4, 8, 16, 32, 32]
    with clock.replaced(lambda: 5.0):
        reason, until = found.of("a")
    assert reason == "it lies; check its machine and weights; it gets no work for 32 h"
    assert until == pytest.approx(5.0 + 32 * 3600, abs=60)
    assert found.of("b") == ("", 0.0)


def test_faulty_instances_are_kept_once_and_within_bounds() -> None:
    found = Quarantine()
    for instance in ("a/1", "a/1", "", *(f"a/{i}" for i in range(2, MAX_FAULTY + 2))):
        found.add("a", "it lies", instance)
    found.add("b", "it lies", "b/1")
    assert len(found.instances) == MAX_FAULTY
    assert found.instances[-2:] == [f"a/{MAX_FAULTY + 1}", "b/1"]
    assert found.instances[0] == "a/3"


def test_a_restarted_router_keeps_its_quarantine(tmp_path: Path) -> None:
    path = tmp_path / "faulty_hosts.json"
    found = Quarantine(path)
    found.add("a", "it lies", "a/1")
    again = Quarantine(path)
    assert again.of("a")[0] == found.of("a")[0]
    assert again.of("a")[1] - time.monotonic() == pytest.approx(3600, abs=600)
    assert (again.instances, again.add("a", "it lies", "a/2")) == (["a/1"], 2)


@pytest.mark.parametrize("damaged", ["", "[]", '{"a": 1}', '{"a": {"reason": "x"}}', "\0"])
def test_a_bad_file_stops_no_router(tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: str) -> None:
    path = tmp_path / "faulty_hosts.json"
    path.write_text(damaged)
    found = Quarantine(path)
    assert f"{path} cannot be read" in caplog.text
    found.add("a", "it lies", "a/1")
    assert Quarantine(path).instances == ["a/1"]
    assert Quarantine(tmp_path / "gone" / "faulty_hosts.json").add("a", "it lies", "a/1") == 1
    assert "will be lost when this process exits" in caplog.text
