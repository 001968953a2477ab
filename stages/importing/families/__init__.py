"""Families of pretrained models that are read, one file for each line of models."""

from onesweep.stages.errors import CheckpointError
from onesweep.stages.importing.families.base import ModelFamily
from onesweep.stages.importing.families.gemma import GEMMA2, GEMMA3
from onesweep.stages.importing.families.llama import LLAMA, MISTRAL, MIXTRAL
from onesweep.stages.importing.families.olmo2 import OLMO2
from onesweep.stages.importing.families.phi3 import PHI3
from onesweep.stages.importing.families.qwen import QWEN2, QWEN3, QWEN3_MOE

FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, OLMO2, GEMMA2, GEMMA3, QWEN3_MOE, MIXTRAL)


def family_named(name: object) -> ModelFamily:
    """By the name of its architecture in config.json. Raises CheckpointError that lists the known ones."""
    found = next((family for family in FAMILIES if family.name == name), None)
    if found is None:
        known = ", ".join(family.name for family in FAMILIES)
        raise CheckpointError(f"the architecture {name} is not supported; there are {known}")
    return found


def gguf_family(name: object, is_mixture: bool) -> ModelFamily:
    """By the name of its architecture in GGUF, and whether it has experts. Raises CheckpointError that lists the known
    ones."""
    known = {each.gguf: each for each in FAMILIES if each.gguf and each.is_mixture == is_mixture}
    found = known.get(name) if isinstance(name, str) else None
    if found is None:
        kind = " as a mixture of experts" if is_mixture else ""
        raise CheckpointError(f"the architecture {name!r}{kind} is not supported; in GGUF, {', '.join(known)} are")
    return found
