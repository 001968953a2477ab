"""The work of a hop on its host, a file for each kind: the checks when it is parsed, and the computation."""
