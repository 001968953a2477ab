"""Training of blocks and AR models on one machine: data, losses, runs, evaluation."""
