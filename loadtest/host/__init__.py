"""Benchmarks of one machine: the cost of serving in time, memory and compute."""
