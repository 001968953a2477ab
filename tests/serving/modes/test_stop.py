"""Stop strings: the cut is the same however the text comes."""

from hypothesis import given
from hypothesis import strategies as st

from serving.router.request import StopCutter

few = st.binary(max_size=40).map(lambda raw: bytes(b"abc"[byte % 3] for byte in raw))
stops = st.lists(few.filter(bool).map(lambda raw: raw[:4]), max_size=4)


def cut(pieces: list[bytes], stop: list[bytes]) -> tuple[bytes, bool]:
    cutter = StopCutter(stop)
    text = b"".join(cutter.feed(piece) for piece in pieces) + cutter.end()
    return text, cutter.stopped


def by_the_definition(text: bytes, stop: list[bytes]) -> tuple[bytes, bool]:
    """Read byte by byte, until what was read ends with a stop string; the longest of those is left out."""
    for end in range(len(text) + 1):
        found = [each for each in stop if text[:end].endswith(each)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(pieces=st.lists(few, max_size=8), stop=stops)
def test_the_cut_is_the_definitions(pieces: list[bytes], stop: list[bytes]) -> None:
    assert cut(pieces, stop) == by_the_definition(b"".join(pieces), stop)


@given(pieces=st.lists(few, max_size=8), stop=stops)
def test_nothing_is_shown_that_is_taken_back_later(pieces: list[bytes], stop: list[bytes]) -> None:
    cutter, shown = StopCutter(stop), b""
    whole, _ = by_the_definition(b"".join(pieces), stop)
    for piece in pieces:
        shown += cutter.feed(piece)
        assert whole.startswith(shown)
