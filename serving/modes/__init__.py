"""The ways of generating text, one file a mode. This file imports nothing heavy: command line and clients read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onesweep.stages.host.parts import ModelKind

MODES = ("sweep", "chunked", "resample", "verified", "infill", "ar", "ar-speculative", "local", "auto")
# Of `ar-speculative`, by the name that a request has for them.
DRAFTERS = ("both", "model", "ngram", "lookup")
# Models of the hosts that can score given symbols, by the name that a request has for them. The first that is served is
# the default.
SCORERS: Mapping[str, ModelKind] = {"chain": "scorer", "ar": "ar"}
