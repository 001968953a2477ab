"""Settings of `onesweep bench frontier`. Help reads this file: nothing heavy here."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from onesweep.loadtest.commands import CHECKPOINT, numbers
from onesweep.loadtest.workload.arms import parse_names
from onesweep.loadtest.workload.testbed import default_hosts
from onesweep.serving.cli.deployment import SHIPPED
from onesweep.stages.settings import setting


@dataclass(frozen=True)
class FrontierSettings:
    """Settings of `onesweep bench frontier`."""

    profiles: tuple[str, ...] = setting(
        ("links-20", "links-60", "links-150"), "networks", metavar="P[,P]", type=parse_names
    )
    profiles_file: Path | None = setting(None, "file with more profiles")
    # A record of `onesweep bench quality`, or a frontier.
    quality: Path | None = setting(None, "of `quality --json`", shown="the bundle's frontier")
    judge_on: Path | None = setting(None, "measure the quality now, on held-out text", metavar="PATH")
    count: int = setting(50, "prompts for --judge-on")
    modes: str | None = setting(None, "of those that were measured, as in `quality`", metavar="SPECS", shown="all")
    max_bytes: int = setting(256, "bytes to generate", name="--bytes", least=1)
    # Of each arm on each profile, after one that warms up.
    requests: int = setting(5, "of each setting on each network", metavar="R", least=1)
    seed: int = setting(0, "of the first request", metavar="S", least=0, most=(1 << 63) - 1)
    prompts: Path | None = setting(None, "text to cut prompts from", metavar="PATH", shown="built-in sentences")
    budgets_ms: tuple[int, ...] = setting(
        (),
        "for mode auto",
        name="--budgets",
        metavar="MS[,MS]",
        shown="between the points",
        type=partial(numbers, flag="--budgets", number=int),
    )
    checkpoint: Path = field(default=SHIPPED.resolve(), metadata=CHECKPOINT)
    hosts: int | None = setting(None, "hosts that share the blocks", shown="3")
    write: Path | None = setting(None, "the file that mode auto chooses from")

    @property
    def host_count(self) -> int:
        return self.hosts or default_hosts(self.checkpoint)
