"""Benchmarks of one machine: what serving costs in time, memory and arithmetic."""
