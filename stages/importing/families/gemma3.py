"""Gemma 3 (text): Gemma 2 with norms of queries and keys in place of soft caps, and a window on five of six layers,
which have a rotary base of their own."""

from dataclasses import replace
from typing import Any

from onesweep.stages.errors import CheckpointError
from onesweep.stages.importing.families.base import (
    GGUF_QK_NORM,
    QK_NORM,
    SLIDING,
    Config,
    every_layer,
    rope_of,
    sliding_layers,
    window,
)
from onesweep.stages.importing.families.gemma2 import (
    GEMMA2,
    GEMMA_DEFAULTS,
    GEMMA_GGUF_TENSORS,
    GEMMA_TENSORS,
    gemma_options,
    gguf_query_scalar,
)

SLIDING_THETA = 10000.0


def _options(config: Config) -> dict[str, Any]:
    period = config.get("sliding_window_pattern", 6)
    options = window(config, sliding_layers(config, (i for i in every_layer(config) if (i + 1) % period)))
    local = rope_of(config, SLIDING) if SLIDING in (config.get("rope_parameters") or {}) else {}
    theta = config.get("rope_local_base_freq") or local.get("rope_theta") or SLIDING_THETA
    if local.get("rope_type", "default") != "default":
        raise CheckpointError(f"rotary scaling {local['rope_type']!r} of layers that slide is not supported")
    if "window" in options:
        options["window"] = replace(options["window"], rope_theta=float(theta))
    return {"qk_norm": "head", **gemma_options(config), **options}


GEMMA3 = replace(
    GEMMA2,
    name="Gemma3ForCausalLM",
    gguf="gemma3",
    tensors=GEMMA_TENSORS | QK_NORM,
    gguf_tensors=GEMMA_GGUF_TENSORS | GGUF_QK_NORM,
    options=_options,
    defaults={**GEMMA_DEFAULTS, "final_logit_softcapping": None},
    rope_theta=1e6,
    gguf_settings=lambda config: gguf_query_scalar(config, largest=62),
)
