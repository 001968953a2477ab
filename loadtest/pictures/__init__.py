"""Drawn pictures against real ones: a judge, distances, and quality against seconds."""
