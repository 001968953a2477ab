"""What makes blocks: data, objectives, local training, evaluation."""
