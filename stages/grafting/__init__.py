"""Blocks of a denoising chain that are stages of a pretrained model, with noisy slots beside its own stream."""
