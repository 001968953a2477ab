"""`onesweep bench fuzz --attacks S`: HTTP/2 attacks on every port, and what others notice of them."""

import asyncio
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from onesweep.loadtest.fuzz import attacker
from onesweep.loadtest.fuzz.base import TargetTally
from onesweep.loadtest.fuzz.commands import FuzzSettings
from onesweep.loadtest.fuzz.healthy import Healthy
from onesweep.loadtest.fuzz.testbed import ROUTER, STAGE, FuzzTestbed, ProcessWatch, open_fuzz_testbed
from onesweep.loadtest.report.record import commit, this_machine
from onesweep.loadtest.report.table import Table, number_column, percentile, text_column
from onesweep.serving.cli.deployment import SHIPPED

CONNECTIONS = {"silent": 6000, "idle": 6000}  # more than a server takes
FLOODING = 4  # connections of the others
MARGIN_S = 30.0
LOOK_S = 0.2


@dataclass(frozen=True)
class AttackResult:
    """One attack on one port, beside healthy requests."""

    target: str
    attack: str
    sent: int  # frames, or connections
    ended: int  # connections, by the server
    right: int  # healthy requests, with the text that they have without an attack
    p95_ms: float | None
    slower: float | None  # than without an attack
    rss_before_mb: float
    rss_mb: float  # the most
    trouble: tuple[str, ...]


ATTACK_TABLE = Table[AttackResult](
    [
        *map(text_column, ("target", "attack", "sent", "ended", "right")),
        number_column("p95 ms", "p95_ms", 0),
        number_column("x", "slower", 2),
        number_column("MB before", "rss_before_mb", 0),
        number_column("most MB", "rss_mb", 0),
        ("trouble", lambda row: str(len(row.trouble))),
    ],
    2,
)


def start_attack(attack: str, address: str, path: str, seconds: float, connections: int) -> "subprocess.Popen[str]":
    """A process of its own, of the lowest priority: an attacker would not take this machine's processor."""
    arguments = [attack, address, path, str(seconds), str(connections)]
    command = ["nice", "-n", "19", sys.executable, "-P", str(Path(attacker.__file__)), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


async def run_attacks(settings: FuzzSettings, say: Callable[[str], None]) -> list[AttackResult]:
    """Raises OnesweepError where there is nothing to attack."""
    assert settings.attacks is not None
    async with open_fuzz_testbed((settings.checkpoint or SHIPPED).resolve()) as testbed:
        host = testbed.deployment.topology.hosts[0]
        ports = {
            "router": (testbed.router, f"/{ROUTER.full_name}/Generate"),
            host.name: (testbed.hosts[0], f"/{STAGE.full_name}/Describe"),
            "http": (testbed.gateway, "/v1/completions"),
        }
        calm = await asyncio.to_thread(Healthy, testbed)
        await _beside(calm, asyncio.sleep(settings.attacks))
        before_s = percentile(sorted(calm.took_s), 95)
        rows = list[AttackResult]()
        for name, (address, path) in ports.items():
            for attack in attacker.ATTACKS:
                healthy = Healthy(testbed, calm.answers)
                row = await _attack(testbed, healthy, name, attack, address, path, settings.attacks, before_s)
                say(f"{name} {attack}: {row.right} right, p95 {row.p95_ms or 0:.0f} ms {'; '.join(row.trouble)}")
                rows.append(row)
        return rows


async def _beside(healthy: Healthy, job: Any) -> Any:  # noqa: ANN401 - whatever the job returns
    healthy.start()
    try:
        return await job
    finally:
        await asyncio.to_thread(healthy.stop)


async def _attack(
    testbed: FuzzTestbed,
    healthy: Healthy,
    name: str,
    attack: str,
    address: str,
    path: str,
    seconds: float,
    before_s: float | None,
) -> AttackResult:
    watch, tally = ProcessWatch(testbed), TargetTally(attack)
    watch.look(tally)
    before_mb = watch.rss_mb[name]
    process = start_attack(attack, address, path, seconds, CONNECTIONS.get(attack, FLOODING))
    ended = threading.Event()

    def wait() -> Counter[str]:
        try:
            return Counter(json.loads(process.communicate(timeout=seconds + MARGIN_S)[0]))
        finally:
            process.kill()
            ended.set()

    async def look() -> None:
        while not ended.is_set():
            watch.look(tally)
            await asyncio.sleep(LOOK_S)

    counts, _ = await _beside(healthy, asyncio.gather(asyncio.to_thread(wait), look()))
    p95_s = percentile(sorted(healthy.took_s), 95)
    found = [f"{name}, {attack}: {words}" for words in [*healthy.trouble, *(f.what for f in tally.findings)]]
    return AttackResult(
        target=name,
        attack=attack,
        sent=counts["sent"],
        ended=counts["ended"] + counts["refused"],
        right=sum(healthy.right.values()),
        p95_ms=p95_s and 1000 * p95_s,
        slower=p95_s / before_s if p95_s and before_s else None,
        rss_before_mb=before_mb,
        rss_mb=watch.rss_mb[name],
        trouble=tuple(found),
    )


def attacks_record(settings: FuzzSettings, rows: list[AttackResult]) -> dict[str, Any]:
    about = {"commit": commit(), "machine": this_machine().sentence, "seconds": settings.attacks}
    return {"attacks": 1, **about, "rows": [asdict(row) for row in rows]}
