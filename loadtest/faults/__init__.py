"""Faults against a real deployment under load, and what they cost: nothing may be lost, and no text may change."""
