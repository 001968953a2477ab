"""The frontier: quality against seconds, a point for each mode and setting on each network."""
