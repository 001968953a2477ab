"""Importing pretrained models: from the files that their makers publish to a checkpoint cut into stages."""
