"""Build hook: a wheel holds the shipped weights within `onesweep`; an editable install reads those of the checkout."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ShippedWeights(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """:param version: of the wheel's kind, "standard" or "editable"."""
        if version != "editable":
            build_data["force_include"]["weights"] = "onesweep/weights"
