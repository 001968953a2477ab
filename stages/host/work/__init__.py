"""The work of a hop on its host, a file for each kind: what is checked when it is parsed, and what it then computes."""
