"""The gate of an import: the model must read the probe text as such a model does, or is refused with a reason."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stages.errors import CheckpointError
from stages.pretrained.source import Source
from stages.pretrained.variant import Variant, damages, settings
from stages.pretrained.walk import losses

NEAR_UNTRAINED = 0.75
"""From this share of ln(V) on, weights say no more about plain English than random ones: trained models are below half."""
CLEAR_NATS = 0.25
"""By so much a change must lower the loss to be held for the cause."""


def check_loss(source: Source, tokens: Sequence[int], is_untrained: bool = False) -> float:
    """The model's cross-entropy on the probe (nats a token).

    Every setting that no shape betrays is tried otherwise, one at a time, in the same pass. Raises CheckpointError when
    the loss is near what untrained weights give, or when one change lowers it clearly: then the weights are loaded,
    but mis-mapped. :param is_untrained: the weights are known to be random, and say nothing.
    """
    variants = list(settings(source))
    if is_untrained:
        return losses(source, tokens, variants[:1])[0]
    nats = [loss if math.isfinite(loss) else math.inf for loss in losses(source, tokens, variants)]
    own, limit = nats[0], math.log(source.architecture.vocabulary)
    best, cause = _best(nats, variants)
    if own < NEAR_UNTRAINED * limit and best > own - CLEAR_NATS:
        return own
    if best > own - CLEAR_NATS:
        others = list(damages(source))
        best, cause = _best(losses(source, tokens, others), others)
    found = f"{own:.2f} nats a token on the probe text, where ln({source.architecture.vocabulary}) = {limit:.2f} is no model"
    if best <= own - CLEAR_NATS:
        raise CheckpointError(
            f"weights loaded but mis-mapped: {found}; with {cause} it is {best:.2f}: most likely that is it"
        )
    raise CheckpointError(
        f"weights loaded but mis-mapped: {found}, and no single change of head layout, rotary embedding, norm epsilon, "
        "tied head or one tensor mends it; random weights are imported with --untrained"
    )


def _best(nats: Sequence[float], variants: Sequence[Variant]) -> tuple[float, str]:
    loss, variant = min(zip(nats, variants, strict=True), key=lambda each: each[0])
    return loss, variant.what
