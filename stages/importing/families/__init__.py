"""Families of pretrained models that are read, one file each."""

from __future__ import annotations

from onesweep.stages.errors import CheckpointError
from onesweep.stages.importing.families.base import ModelFamily
from onesweep.stages.importing.families.gemma2 import GEMMA2
from onesweep.stages.importing.families.gemma3 import GEMMA3
from onesweep.stages.importing.families.llama import LLAMA
from onesweep.stages.importing.families.mistral import MISTRAL
from onesweep.stages.importing.families.olmo2 import OLMO2
from onesweep.stages.importing.families.phi3 import PHI3
from onesweep.stages.importing.families.qwen2 import QWEN2
from onesweep.stages.importing.families.qwen3 import QWEN3

FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, OLMO2, GEMMA2, GEMMA3)


def family_named(name: object) -> ModelFamily:
    """By the name of its architecture in config.json. Raises CheckpointError that lists the known ones."""
    found = next((family for family in FAMILIES if family.name == name), None)
    if found is None:
        known = ", ".join(family.name for family in FAMILIES)
        raise CheckpointError(f"the architecture {name} is not supported; there are {known}")
    return found


def gguf_family(name: object) -> ModelFamily:
    """By the name of its architecture in GGUF. Raises CheckpointError that lists the known ones."""
    known = {family.gguf: family for family in FAMILIES if family.gguf}
    if not isinstance(name, str) or name not in known:
        raise CheckpointError(f"the architecture {name!r} is not supported; in GGUF, {', '.join(known)} are")
    return known[name]
