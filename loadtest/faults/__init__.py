"""Faults against a real deployment under load, and their cost: no request may be lost, and no text may change."""
