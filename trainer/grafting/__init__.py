"""Blocks of a denoising chain made from the layers of a pretrained model."""
