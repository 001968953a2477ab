"""What measures: the emulated WAN, locust users, benchmarks and reports."""
