"""What the users ask for: a bounded set of prompts and seeds, so that each text can be checked."""

from __future__ import annotations

from dataclasses import dataclass

from stages.errors import InputError

MIN_PROMPT_BYTES = 8
"""Less room than this before the output is no load to speak of."""

SENTENCES = (
    "The sea was calm.",
    "It was late when ",
    "She opened the door and said, ",
    "The old man looked at the sea and said that ",
    "In the morning ",
    "Nobody in the village had ever seen such a winter, and so ",
    "He had walked the whole night through the rain before he came to the house where his brother lived, and ",
    "The letter began with the words ",
    "On the third day the wind turned, the fog lifted from the hills, and for the first time we saw ",
    "A train left the station at noon; ",
    "They talked about the price of corn, ",
    "The captain wrote in his book that ",
    "When the lamp went out ",
    "There were three keys on the table: one for the gate, one for the cellar, and one that ",
    "The teacher asked the children why ",
    "Far away, behind the last houses of the town, a dog began to bark, and then another, until ",
    "Her answer was short. ",
    "Of all the stories that my grandmother used to tell us by the fire, the one that I remember best is about ",
    "The river ",
    "We had bread, cheese and a little wine, and ",
    "The doctor shook his head and ",
    "If you follow the road to the north ",
    "The clock struck ",
)


@dataclass(frozen=True)
class Case:
    """A prompt and a seed: with the run's settings, one text."""

    prompt: str
    seed: int


def make_cases(count: int, first_seed: int, max_bytes: int, context_bytes: int) -> tuple[Case, ...]:
    """`count` cases with seeds of their own and prompts of different lengths, cut to what the context leaves.

    :param context_bytes: most bytes of prompt and output together.
    Raises InputError when there is no room for a prompt.
    """
    room = context_bytes - max_bytes
    if room < MIN_PROMPT_BYTES:
        most = context_bytes - MIN_PROMPT_BYTES
        raise InputError(f"--bytes must be 1 to {most}, what the context of {context_bytes} leaves: not {max_bytes}")
    return tuple(Case(SENTENCES[i % len(SENTENCES)][:room], first_seed + i) for i in range(count))
