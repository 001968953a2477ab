"""The cut of a model over hosts: layers per stage such that the slowest host is as fast as possible."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from stages.errors import InputError
from stages.model.architecture import LlamaArchitecture, Matrix
from stages.model.few_bits import BYTES_EACH, INT8_BYTES_EACH
from stages.progress import counted

NUMBER_BYTES = 4
MEGABYTE = 1e6


# A model is cut into contiguous stages of about equal cost. The cost of a layer, and of the head, is the count of its
# matrices' numbers: unlike timing, counting gives the same cut on every machine. A step reads one row of the embedding,
# and only the used experts of a mixture. Among equally fast cuts, the one whose largest stage is smallest wins.
@dataclass(frozen=True)
class StageCost:
    """The cost of a stage to its host."""

    layers: int
    step: int  # numbers that each token's step reads
    held: int  # bytes in memory, and in the file


def stage_cost(architecture: LlamaArchitecture, layers: int, first: bool, last: bool) -> StageCost:
    """Cost of a stage of `layers` layers, with the embedding if it is the first and the head if it is the last."""
    a = architecture
    attention: dict[Matrix, int] = {"qkv": a.width * a.qkv_width, "attention_out": a.width * a.query_width}
    mlp: dict[Matrix, int] = {"mlp_in": 2 * a.width * a.mlp_width, "mlp_out": a.width * a.mlp_width}
    used, count, router = (a.experts.used, a.experts.count, a.experts.count * a.width) if a.experts else (1, 1, 0)
    table = a.vocabulary * a.width
    step = layers * (sum(attention.values()) + used * sum(mlp.values()) + router) + last * table
    each = {"float32": NUMBER_BYTES, "bfloat16": 2, "q8": INT8_BYTES_EACH, "q4": BYTES_EACH}
    in_table = INT8_BYTES_EACH if a.is_grouped else NUMBER_BYTES
    stored = attention | {matrix: count * numbers for matrix, numbers in mlp.items()}
    in_layer = sum(each[a.weights_of(name)] * numbers for name, numbers in stored.items()) + NUMBER_BYTES * router
    is_shared = first and last and a.tied_head and not a.is_grouped
    return StageCost(layers, step, int(layers * in_layer + in_table * (first + last - is_shared) * table))


def stage_costs(architecture: LlamaArchitecture) -> list[StageCost]:
    """Cost of each stage. architecture: cut."""
    a = architecture
    return [stage_cost(a, count, i == 0, i == a.parts - 1) for i, count in enumerate(a.layers)]


def stage_lines(a: LlamaArchitecture, drafter_bytes: int = 0) -> list[str]:
    """A line for each stage: its host's memory (with the drafter on the last host), and its share of the work."""
    costs = stage_costs(a)
    whole = sum(cost.step for cost in costs)
    ends = [" with the embedding" * (i == 0) + " with the head" * (i == a.parts - 1) for i in range(a.parts)]
    lines = [
        f"stage {i}: {counted(cost.layers, 'layer')}{ends[i]}, {cost.step / whole:.0%} of a step's work, "
        f"{cost.held / MEGABYTE:.0f} MB"
        for i, cost in enumerate(costs)
    ]
    lines[-1] += f" and {drafter_bytes / MEGABYTE:.0f} MB of the drafter" if drafter_bytes else ""
    return lines


@dataclass(frozen=True)
class StageHost:
    """A host that will hold a stage: its speed relative to the others, and its room for weights."""

    speed: float = 1.0
    memory_bytes: float = math.inf
    name: str = ""  # for the sentence that refuses a too large model


def host_shares(count: int, speeds: Sequence[float] | None, memory_mb: Sequence[float] | None) -> tuple[StageHost, ...]:
    """Hosts of `count` stages; none if nothing describes them. Raises InputError for too few or too many numbers."""
    for flag, given in (("--speeds", speeds), ("--memory-mb", memory_mb)):
        if given is not None and len(given) != count:
            raise InputError(f"{flag} has {len(given)} numbers for {count} stages: give one for each host")
    if speeds is None and memory_mb is None:
        return ()
    rooms = [mb * MEGABYTE for mb in memory_mb] if memory_mb else [math.inf] * count
    return tuple(map(StageHost, speeds or [1.0] * count, rooms))


def cut(architecture: LlamaArchitecture, hosts: Sequence[StageHost]) -> tuple[int, ...]:
    """Layers of each host's stage, such that the slowest is as fast as possible. architecture: uncut.

    :param hosts: at most as many as there are layers. Raises InputError for hosts that cannot hold the model.
    """
    total, stages = sum(architecture.layers), len(hosts)

    @lru_cache(None)
    def best(begin: int, left: int) -> tuple[float, int, int, tuple[int, ...]] | None:
        """Best cut of the layers from `begin` on into `left` stages: worst step, most held, layers moved, the cut."""
        ways: list[tuple[float, int, int, tuple[int, ...]]] = []
        host = hosts[stages - left]
        for count in range(1, total - begin - left + 2) if left > 1 else [total - begin]:
            cost = stage_cost(architecture, count, begin == 0, left == 1)
            after = best(begin + count, left - 1) if left > 1 else (0.0, 0, 0, ())
            if after is None or cost.held > host.memory_bytes:
                continue
            step, held, spread, rest = after
            ways.append((max(step, cost.step / host.speed), max(held, cost.held), spread + count**2, (count, *rest)))
        return min(ways, default=None)

    if (found := best(0, stages)) is None:
        raise InputError(_too_large(architecture, hosts))
    return found[3]


def _too_large(a: LlamaArchitecture, hosts: Sequence[StageHost]) -> str:
    needed = stage_cost(a, sum(a.layers), first=True, last=True).held / MEGABYTE
    room = sum(host.memory_bytes for host in hosts) / MEGABYTE
    named = ", ".join(f"{host.name} {host.memory_bytes / MEGABYTE:,.1f} MB" for host in hosts if host.name)
    rooms = named and f" (room: {named})"
    if needed > room:
        return (
            f"the weights take {needed:,.0f} MB, but the hosts have room for {room:,.0f}: "
            f"{needed - room:,.0f} MB are missing; add memory or hosts{rooms}"
        )
    layer, first, last = (
        stage_cost(a, 1, *ends).held / MEGABYTE for ends in ((False, False), (True, False), (False, True))
    )
    return (
        f"the weights fit these hosts together, but no cut between layers fits each: a layer takes {layer:,.1f} MB, "
        f"with the embedding {first:,.1f} MB on the first host, with the head {last:,.1f} MB on the last{rooms}"
    )
