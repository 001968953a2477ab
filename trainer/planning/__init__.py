"""Plans: bytes, hours, utilisation and memory of each variant of a run's rounds, before it starts."""
