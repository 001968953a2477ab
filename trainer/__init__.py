"""Training: blocks on one machine, rounds of workers over a network, and plans."""
