"""Bounds that clients, routers and hosts share. It must not import torch: clients import it."""

MAX_COUNT = (1 << 32) - 1
MAX_SEED = (1 << 64) - 1
MAX_TEMPERATURE = 100.0
MAX_STEPS = 64  # Euler steps in each block
MAX_DRAFT, MAX_BRANCHES = 32, 8  # draft tokens of a sweep, and alternatives at a place
MAX_CANDIDATES = 1024  # continuations in a step
# Most likely tokens that are told of, and biases: as OpenAI's API has it.
MAX_LOGPROBS = 20
MAX_BIASES, MAX_BIAS = 300, 100.0
# Of frequency and presence: likewise.
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 10.0
MAX_ENDS = 64  # tokens that end a text
MAX_ADDRESS = 255  # characters of HOST:PORT
MOST_RELEASES = 2  # of a host: what new requests use, and what they used before, or are about to
MAX_THREADS = 1024  # processor threads of a process
MAX_NESTING = 100  # of JSON: it is copied and written by recursion, of which Python has 1,000 levels


def nesting(value: object) -> int:
    """Objects and lists in one another in a value of JSON."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth, level = depth + 1, [x for each in level for x in (each.values() if isinstance(each, dict) else each)]
    return depth
