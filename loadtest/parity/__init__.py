"""What hosts write, held against `transformers` in one process."""
