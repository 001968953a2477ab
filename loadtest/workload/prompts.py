"""Prompts of the benchmarks, and the lengths of their outputs."""

from dataclasses import dataclass

from stages.errors import InputError


@dataclass(frozen=True)
class Prompts:
    """Prompts of one kind; requests use them in turn, and start over after the last."""

    name: str
    texts: tuple[str, ...]

    def text(self, number: int) -> str:
        """The prompt of the request with this number."""
        return self.texts[number % len(self.texts)]


BYTES, TOKENS, LEVELS = "bytes", "tokens", "levels"


@dataclass(frozen=True)
class Length:
    """Most bytes or tokens of an output, since a text may end early; for pictures the levels."""

    count: int
    unit: str = BYTES  # a byte model's tokens are bytes

    def __str__(self) -> str:
        return f"{self.count} {self.unit}"

    @property
    def draws(self) -> bool:
        """True for pictures."""
        return self.unit == LEVELS


# No opening ends with a space, because most models' tokens begin with theirs.
# Openings of texts that the model has to invent.
NOVEL = Prompts(
    "novel",
    (
        "The old man looked at the sea and said that",
        "It was late when the last guests",
        "On the third day the wind turned, and",
        "She opened the letter, read it twice and",
        "A train left the station at noon, but",
        "Nobody in the village had ever seen",
        "Before you plant a tree, you should",
        "The main reason why bread rises is",
        "In the year 1912 a young engineer",
        "My grandmother used to tell us about",
        "The two teams met again in the final, where",
        "If you follow the road to the north,",
        "Scientists have found a new kind of",
        "The captain wrote in his book that",
        "There are three things that a good teacher",
        "When the lamp went out, the children",
        "The price of corn had fallen so low that",
        "Dear Sir, I am writing to you because",
        "Most people believe that cats",
        "The museum opens at nine. Visitors",
        "To mend a broken chair, first",
        "He had walked the whole night through,",
        "The river rises in the hills and",
        "Our plan for the next winter is to",
    ),
)

# Texts to repeat, edit or continue: most of the output is in the prompt.
COPYING = Prompts(
    "copying",
    (
        "The ferry leaves the north pier at seven, calls at both islands and is back before noon. In winter it waits "
        "for the mail. Dogs travel free, bicycles cost two crowns, and nobody may smoke below deck. If you have lost a "
        "ticket, you pay again; if you find one, hand it to the mate.\n\n"
        "The ferry leaves the north pier at seven, calls at both islands",
        "Packing list:\n- two blankets\n- a tin of tea\n- matches in a dry bag\n- twenty metres of rope\n"
        "- the blue lantern\n- bread for three days\n- a map of the coast\n- salt and pepper\n- a spare pair of boots\n"
        "- needle and thread\n- the letters for the harbour master\n\n"
        "The same list, in the same order:\n- two blankets\n- a tin of tea\n- matches in a dry bag\n-",
        "def north(place):\n    x, y = place\n    return checked((x, y + 1))\n\n\n"
        "def south(place):\n    x, y = place\n    return checked((x, y - 1))\n\n\n"
        "def east(place):\n    x, y = place\n    return checked((x + 1, y))\n\n\n"
        "def west(place):\n    x, y = place\n    return checked((x - 1, y))\n\n\n# in three dimensions\n\n\n"
        "def north(place):\n    x, y, z = place\n",
        "name,address,port,state\nparis,10.8.0.1,7701,ready\ntokyo,10.8.0.2,7701,ready\naustin,10.8.0.3,7701,ready\n"
        "lagos,10.8.0.4,7701,ready\nquito,10.8.0.5,7701,ready\nperth,10.8.0.6,7701,ready\ndelhi,10.8.0.7,7701,ready\n"
        "sofia,10.8.0.8,7701,ready\n\nThe same table, one hour later:\n\n"
        "name,address,port,state\nparis,10.8.0.1,7701,ready\ntokyo,",
        'Before: "The committe met on monday and it was agreed that the bridge should be repared before winter, that '
        "the toll should stay as it is, and that a second lamp should be put up at the northern end, where carts have "
        'to wait."\n\nAfter: "The committee met on Monday and it was agreed that the bridge',
        "One key is for the gate, one for the cellar, and one for the chest that nobody opens. "
        "The first hangs by the door, the second by the stove, and the third is at the bottom of the well.\n\n"
        "One key is for the gate, one for the cellar, and one for the chest that nobody opens. The first hangs",
    ),
)

BUILT_IN = {prompts.name: prompts for prompts in (NOVEL, COPYING)}

# The users' requests: a bounded set of prompts and seeds, so that each text can be checked.

MIN_PROMPT_BYTES = 8  # a shorter prompt is hardly any load


@dataclass(frozen=True)
class SeededPrompt:
    """A prompt and a seed, which with the run's settings determine one text."""

    prompt: str
    seed: int


@dataclass(frozen=True)
class SeededRequest(SeededPrompt):
    """A request with exactly one right answer. Its fields are arguments of `Client.stream`."""

    mode: str
    max_bytes: int


def seeded_prompts(count: int, first_seed: int, max_bytes: int, context_length: int) -> tuple[SeededPrompt, ...]:
    """`count` cases, each with its own seed and a prompt cut to the room that the context leaves.

    :param context_length: most bytes of prompt and output together.
    Raises InputError if there is no room for a prompt.
    """
    room = context_length - max_bytes
    if room < MIN_PROMPT_BYTES:
        most = context_length - MIN_PROMPT_BYTES
        raise InputError(f"--bytes must be 1 to {most} to fit the context of {context_length}, not {max_bytes}")
    return tuple(SeededPrompt(NOVEL.text(i)[:room], first_seed + i) for i in range(count))
