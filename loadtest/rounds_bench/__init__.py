"""Rounds over far links, against training in one place and against what was planned."""
