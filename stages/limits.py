"""Bounds that clients, routers and hosts share. This module must not import torch: clients import it."""

MAX_COUNT = (1 << 32) - 1
MAX_SEED = (1 << 64) - 1
MAX_TEMPERATURE = 100.0
MAX_STEPS = 64  # Euler steps in each block
MAX_DRAFT, MAX_BRANCHES = 32, 8  # draft tokens of a sweep, and alternatives at a position
MAX_CANDIDATES = 1024  # candidates in a step
# Most likely tokens in logprobs, and biases: as in OpenAI's API.
MAX_LOGPROBS = 20
MAX_BIASES, MAX_BIAS = 300, 100.0
# Frequency and presence penalties: likewise.
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 10.0
MAX_ENDS = 64  # tokens that end a text
MAX_ADDRESS = 255  # characters of HOST:PORT
MAX_RELEASES = 2  # of a host: the one for new requests, and the previous or the next one
MAX_THREADS = 1024  # processor threads of a process
MAX_NESTING = 100  # of JSON: recursion copies and writes it, and Python allows 1,000 levels


def nesting(value: object) -> int:
    """Depth of nested objects and lists in a JSON value."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth, level = depth + 1, [x for each in level for x in (each.values() if isinstance(each, dict) else each)]
    return depth
