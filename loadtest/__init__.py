"""Measurements: the emulated WAN, locust users, benchmarks and reports."""
