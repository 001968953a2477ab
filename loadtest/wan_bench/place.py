"""Where the benchmark runs: in a lab of emulated links, or on this machine as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from loadtest.wan.lab import Lab, temporary_lab
from loadtest.wan.profile import Profile, node_names
from loadtest.wan_bench.deployment import deployed
from loadtest.wan_bench.floor import Course, Instant
from loadtest.wan_bench.settings import LOOPBACK, WanSettings, host_count
from loadtest.wan_bench.station import Station, open_station
from serving.deployment import temporary_deployment
from serving.ports import free_port_block
from serving.topology import local_topology
from stages.parts import plan_host


def course_of(settings: WanSettings, profile: Profile | None) -> Course:
    """:param profile: None = loopback, whose links take no time."""
    return Course(node_names(host_count(settings))[1:], profile.link if profile else _no_link)


@contextlib.contextmanager
def in_a_lab(settings: WanSettings, profile: Profile) -> Iterator[tuple[Lab, Station]]:
    """A deployment in the nodes of a lab of this profile, ready. Raises OnesweepError."""
    course = course_of(settings, profile)
    with (
        temporary_lab(profile, len(course.hosts)) as lab,
        deployed(lab, settings.checkpoint, settings.host_options) as deployment,
        open_station(profile.name, deployment, course, lab.command) as station,
    ):
        yield lab, station


@contextlib.contextmanager
def on_loopback(settings: WanSettings) -> Iterator[Station]:
    """A deployment without any lab, ready. Raises OnesweepError."""
    course = course_of(settings, None)
    hosts, parts = len(course.hosts), plan_host(settings.checkpoint, (0,)).parts
    topology = local_topology(hosts, parts, settings.checkpoint, free_port_block(hosts + 1) + 1)
    with (
        temporary_deployment(
            topology, settings.checkpoint, place=_dies_with_us, host_options=settings.host_options
        ) as deployment,
        open_station(LOOPBACK, deployment, course, _dies_with_us) as station,
    ):
        yield station


def _no_link(source: str, destination: str) -> Instant:
    return Instant()


def _dies_with_us(name: str, argv: list[str]) -> list[str]:
    """Runs on this machine as it is, but does not outlive this process, as nothing in a lab does."""
    return ["setpriv", "--pdeathsig", "KILL", "--", *argv]
