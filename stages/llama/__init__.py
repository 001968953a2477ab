"""Pretrained models of the Llama family, as stages of an AR pipeline."""
