"""What an import made, for people."""

from __future__ import annotations

import math

from stages.llama.architecture import LlamaArchitecture
from stages.pretrained.cut import stage_cost
from stages.pretrained.importing import Imported

MEGABYTE = 1e6


def summary(imported: Imported) -> str:
    """A line on the gate, then one for each stage."""
    manifest, a = imported.manifest, imported.manifest.architecture
    assert isinstance(a, LlamaArchitecture)
    limit = math.log(a.vocabulary)
    costs = [stage_cost(a, a.layers_in(i), i == 0, i == a.parts - 1) for i in range(a.parts)]
    whole = sum(cost.step for cost in costs)
    lines = [f"{imported.nats:.3f} nats a token on the probe text (ln({a.vocabulary}) = {limit:.2f} is no model)"]
    for i, (cost, part) in enumerate(zip(costs, manifest.parts, strict=True)):
        assert part is not None
        ends = " with the embedding" * (i == 0) + " with the head" * (i == a.parts - 1)
        lines.append(
            f"stage {i}: {cost.layers} layers{ends}, {cost.step / whole:.0%} of a step's work, "
            f"{part.bytes / MEGABYTE:.0f} MB, {part.file}"
        )
    return "\n".join(lines)
