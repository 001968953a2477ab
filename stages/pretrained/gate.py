"""The gate of an import: the model must read the probe text as such a model does, or is refused with a reason."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stages.errors import CheckpointError
from stages.pretrained.source import Source
from stages.pretrained.variant import Variant, omissions, settings
from stages.pretrained.walk import losses

NEAR_UNTRAINED = 0.75
"""From this share of ln(V) on, weights say no more of plain English than random ones: trained models are far below."""
CLEAR_NATS = 0.25
"""By so much a change must lower the loss to be held for the cause."""


def check_loss(source: Source, tokens: Sequence[int], is_untrained: bool = False) -> float:
    """The model's cross-entropy on the probe (nats a token).

    What no shape betrays is tried otherwise, one thing at a time, in the same pass. Raises CheckpointError when
    the loss is near what untrained weights give, or when one change lowers it clearly: then the weights are loaded,
    but mis-mapped. :param is_untrained: the weights are known to be random, and say nothing.
    """
    variants = list(settings(source))
    if is_untrained:
        return _finite(losses(source, tokens, variants[:1])[0])
    limit = math.log(source.architecture.vocabulary)
    nats = losses(source, tokens, variants)
    own = nats[0] if math.isfinite(nats[0]) else math.inf
    is_trained = own < NEAR_UNTRAINED * limit
    best, cause = _best(nats, variants)
    mended = min(own - CLEAR_NATS, NEAR_UNTRAINED * limit)
    if is_trained and best > mended:
        return own
    if best > mended:
        others = list(omissions(source))
        best, cause = _best(losses(source, tokens, others), others)
    untrained = f"ln({source.architecture.vocabulary}) = {limit:.2f} is what untrained weights give"
    found = f"weights loaded but mis-mapped: {own:.2f} nats a token on the probe text, where {untrained}"
    if best <= mended:
        raise CheckpointError(f"{found}; with {cause} it is {best:.2f}: most likely that is the cause")
    raise CheckpointError(
        f"{found}, and no single change of head layout, rotary embedding, norm epsilon, tied head or one tensor mends "
        "it; random weights are imported with --untrained"
    )


def _finite(nats: float) -> float:
    if not math.isfinite(nats):
        raise CheckpointError("these weights give no finite loss on the probe text: they are damaged")
    return nats


def _best(nats: Sequence[float], variants: Sequence[Variant]) -> tuple[float, str]:
    finite = ((loss, variant.what) for loss, variant in zip(nats, variants, strict=True) if math.isfinite(loss))
    return min(finite, default=(math.inf, ""))
