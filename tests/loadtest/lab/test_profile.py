"""Profiles: what is read, and the sentence for what cannot be."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from loadtest.lab.profile import ConfigError, Link, Profile, profile_named, read_profiles

SHIPPED = ["consumer", "lan", "links-150", "links-20", "links-60", "nat", "three-regions"]


def read(tmp_path: Path, text: str) -> dict[str, Profile]:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return read_profiles(path)


def test_shipped_profiles_have_the_links_of_their_names() -> None:
    shipped = read_profiles()
    assert sorted(shipped) == SHIPPED
    for rtt_ms in (20, 60, 150):
        link = shipped[f"links-{rtt_ms}"].link("host-3", "router")
        assert (2 * link.delay_ms, link.rate_mbps, link.loss) == (rtt_ms, 100, 0)
    regions = shipped["three-regions"]
    far = [2 * regions.link("router", f"host-{i}").delay_ms for i in (1, 2, 3, 4)]
    assert far == [1, 35, 110, 110]
    assert regions.link("host-3", "host-2").delay_ms == 40
    assert all(Profile.from_record(json.loads(json.dumps(asdict(each)))) == each for each in shipped.values())


def test_profiles_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        "[mine]\ndelay_ms = 3\nrate_mbps = 10\nqueue_ms = 5\n"
        "[[mine.links]]\nbetween = ['router', 'host-2']\nqueue_ms = 30\n"
        "[[mine.links]]\nsource = 'host-2'\ndestination = 'router'\nloss = 0.5\n"
    )
    mine = profile_named(f"{path}:mine")
    assert mine.link("router", "host-2") == Link(delay_ms=3, rate_mbps=10, queue_ms=30)
    assert mine.link("host-2", "router") == Link(delay_ms=3, rate_mbps=10, queue_ms=5, loss=0.5)
    assert mine.link("host-1", "host-2") == Link(delay_ms=3, rate_mbps=10, queue_ms=5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("delay_ms = -1", "delay_ms must be a number from 0 to 60000, not -1"),
        ("delay_ms = inf", "delay_ms must be a number from 0 to 60000, not inf"),
        ("delay_ms = 'far'", "delay_ms must be a number from 0 to 60000, not 'far'"),
        ("rate_mbps = 0", "rate_mbps must be a finite number above 0, not 0"),
        ("loss = 1", "loss must be a number from 0 to 0.99, not 1"),
        ("jitter_ms = 2\ndelay_ms = 1", "jitter_ms must be 0 to delay_ms (1), not 2"),
        ("queue_ms = 2", "queue_ms has no effect without rate_mbps: give"),
        ("rate_mbps = 1\nqueue_ms = 0", "queue_ms must be a finite number above 0, not 0"),
        ("speed = 1", "profile 'p': unknown setting 'speed'; available: delay_ms, jitter_ms"),
        ("links = 1", "links must be sections [[p.links]]"),
        ("links = [1]", "profile 'p', link 1 must be a group of settings, not 1"),
        ("[[p.links]]\ndelay_ms = 1", 'give between = ["router", "host-1"], or source and destination'),
        ("[[p.links]]\nsource = 'router'", "or source and destination"),
        ("[[p.links]]\nbetween = ['router', 'paris']", "no node 'paris'; nodes are router, host-1 to host-64"),
        ("[[p.links]]\nbetween = ['router', 'router']", "a link must have two different ends"),
        ("[[p.links]]\nbetween = ['router', 'host-1']\nloss = 3", "profile 'p', link 1: loss must be a number from 0"),
        ("[[p.links]]\nbetween = ['router', 'host-1']\nfar = 3", "link 1: unknown setting 'far'"),
        ("gateways = ['router']", 'write gateways = ["host-1"], and closed = { host-2 = ["router", "host-1"] }'),
        ("closed = { host-1 = 1 }", 'and closed = { host-2 = ["router", "host-1"] }'),
    ],
)
def test_an_invalid_profile_is_explained(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, f"[p]\n{text}")
    assert message in str(caught.value)
    assert str(tmp_path / "mine.toml") in str(caught.value)
    assert caught.value.exit_code == 2


def test_unreadable_files_and_unknown_profiles_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the profiles .*absent\.toml: No such file"):
        read_profiles(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_profiles(tmp_path)
    (tmp_path / "flat.toml").write_text("delay_ms = 1")
    with pytest.raises(ConfigError, match="profile 'delay_ms' must be a section"):
        read_profiles(tmp_path / "flat.toml")
    with pytest.raises(ConfigError, match=f"no profile 'mars'; available: {', '.join(SHIPPED)}"):
        profile_named("mars")
