"""The deployment under load: one that is started here, on loopback or in a lab, or one that is there already."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from loadtest.load.access import Access
from serving.deployment import temporary_deployment
from serving.ports import free_port_block
from serving.shipped import SHIPPED
from serving.topology import local_topology
from stages.errors import InputError, ServiceError
from stages.parts import plan_host

LOOPBACK = "loopback"
"""The profile that needs no lab: every process on this machine, no link emulated."""
AS_FOUND = "as found"
DEFAULT_HOSTS = 3


@dataclass(frozen=True)
class RouterFacts:
    """What the router says of itself."""

    ready: bool
    problem: str
    modes: list[str]
    hosts: int
    context_bytes: int
    request_limit: int


@dataclass(frozen=True)
class Target:
    """A router and how to start a program beside it."""

    access: Access
    profile: str
    checkpoint: Path | None
    """Bundle that is served; None where that is not known."""
    beside: Callable[[list[str]], list[str]] = list
    """Turns a command into one that runs on the router's machine, and ends with this process."""

    @property
    def router(self) -> str:
        return self.access.router

    def facts(self) -> RouterFacts:
        """Raises ServiceError when no router answers, or its hosts are not ready."""
        facts = RouterFacts(**next(self.ask([])))
        if not facts.ready:
            raise ServiceError(f"the router at {self.router} is not ready: {facts.problem}")
        return facts

    def ask(self, requests: list[dict[str, Any]]) -> Iterator[Any]:
        """The router's status, then the text of each request in hex, one at a time. Raises ServiceError."""
        command = self.beside([sys.executable, "-P", "-m", "loadtest.load.alone"])
        outcome = subprocess.run(
            command,
            input=json.dumps({"access": asdict(self.access), "requests": requests}),
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,  # Ctrl-C is for this process to act on
        )
        if outcome.returncode:
            words = outcome.stderr.strip().splitlines() or ["the program beside the router ended without a word"]
            raise (InputError if outcome.returncode == InputError.exit_code else ServiceError)(words[-1])
        return map(json.loads, outcome.stdout.splitlines())


@dataclass(frozen=True)
class TargetSettings:
    """Which deployment a user wants under load."""

    profile: str = LOOPBACK
    access: Access | None = None
    """To one that is there; None = start one."""
    checkpoint: Path | None = None
    """None = the shipped weights."""
    hosts: int | None = None
    """None = three, or one for each block where there are fewer."""
    profiles: Path | None = None
    """File with more profiles than those that ship."""
    router_options: tuple[str, ...] = ()
    """More options of the router that is started."""

    @property
    def bundle(self) -> Path:
        return (self.checkpoint or SHIPPED).resolve()

    @property
    def host_count(self) -> int:
        return min(DEFAULT_HOSTS, plan_host(self.bundle, (0,)).parts) if self.hosts is None else self.hosts


@contextlib.contextmanager
def open_target(settings: TargetSettings) -> Iterator[Target]:
    """The deployment, ready; what was started is stopped at the end. Raises OnesweepError."""
    if settings.access is not None:
        yield Target(settings.access, AS_FOUND, None)
    elif settings.profile == LOOPBACK:
        with _on_loopback(settings) as target:
            yield target
    else:
        with _in_a_lab(settings) as target:
            yield target


@contextlib.contextmanager
def _on_loopback(settings: TargetSettings) -> Iterator[Target]:
    checkpoint, hosts = settings.bundle, settings.host_count
    topology = local_topology(hosts, plan_host(checkpoint, (0,)).parts, checkpoint, free_port_block(hosts + 1) + 1)
    with temporary_deployment(topology, checkpoint, router_options=settings.router_options) as deployment:
        yield Target(Access(deployment.topology.router), LOOPBACK, checkpoint)


@contextlib.contextmanager
def _in_a_lab(settings: TargetSettings) -> Iterator[Target]:
    from loadtest.wan.lab import temporary_lab
    from loadtest.wan.profile import ROUTER, profile_named
    from loadtest.wan_bench.deployment import deployed

    profile = profile_named(settings.profile, settings.profiles)
    options = settings.router_options
    with (
        temporary_lab(profile, settings.host_count) as lab,
        deployed(lab, settings.bundle, router_options=options) as deployment,
    ):
        access = Access(deployment.topology.router, insecure=True)
        yield Target(access, settings.profile, settings.bundle, partial(lab.command, ROUTER))


def check_target(settings: TargetSettings) -> None:
    """Everything that can be refused before anything is started. Raises OnesweepError."""
    if settings.access is not None:
        for flag, given in (
            ("--hosts", settings.hosts),
            ("--checkpoint", settings.checkpoint),
            ("--profile", None if settings.profile == LOOPBACK else settings.profile),
        ):
            if given is not None:
                raise InputError(f"--router names a deployment that is there, as it is: leave out {flag}")
        return
    if settings.profile != LOOPBACK:
        _check_lab(settings)
    local_topology(settings.host_count, plan_host(settings.bundle, (0,)).parts, settings.bundle)


def _check_lab(settings: TargetSettings) -> None:
    from loadtest.wan.lab import lab_problem
    from loadtest.wan.profile import profile_named

    profile_named(settings.profile, settings.profiles).check_hosts(settings.host_count)
    if problem := lab_problem():
        raise ServiceError(f"{problem}; --profile {LOOPBACK} needs no lab")
