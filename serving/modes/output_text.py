"""The output text on its way to the client: decoded from tokens, cut where the request says."""

from collections.abc import Sequence

from serving.modes.tokenizer import Tokenizer


class OutputText:
    """Applies stop strings and a byte limit to a model's output. The text does not depend on how it is split."""

    def __init__(self, tokenizer: Tokenizer, prompt: bytes, stops: Sequence[bytes], max_bytes: int | None) -> None:
        """:param prompt: in tokens.

        :param max_bytes: None = no limit but that of tokens. The cut never splits a character.
        """
        self._reader, self._cutter, self._left = tokenizer.detokenizer(prompt), StopCutter(stops), max_bytes
        # the name of a control token never appears in the text: as a stop string, the token itself ends the text
        self._numbers, self._vocabulary = tokenizer.hidden_tokens(stops), tokenizer.vocabulary
        self.stopped = self.over = False  # a stop string ended the text; the text is complete

    def feed(self, tokens: bytes) -> bytes:
        """The text that can be handed out now."""
        if self._numbers:
            written = self._vocabulary.tokens(tokens)
            count = next((i for i, token in enumerate(written) if token in self._numbers), len(written))
            tokens, self.stopped = self._vocabulary.cut(tokens, 0, count), count < len(written)
        text = self._reader.feed(tokens)
        return self._within(self._cutter.feed(text)) if self._cutter.stops or self._left is not None else text

    def end(self) -> bytes:
        """The text held back until the end."""
        return self._within(self._cutter.feed(self._reader.end()) + self._cutter.end())

    def _within(self, text: bytes) -> bytes:
        self.stopped = self.stopped or self._cutter.stopped
        self.over = self.stopped or (self._left is not None and len(text) >= self._left)
        if self._left is None:
            return text
        if len(text) <= self._left:
            self._left -= len(text)
            return text
        end, self._left = self._left, 0
        while end and text[end] & 0xC0 == 0x80:  # in the middle of a character
            end -= 1
        return text[:end]


class StopCutter:
    """Cuts a text that arrives in pieces before the first complete stop string.

    The cut is that of a text that arrives byte by byte, however it is split. If two stop strings end with the same
    byte, the longer one counts.
    """

    def __init__(self, stops: Sequence[bytes]) -> None:
        self.stops = [stop for stop in stops if stop]
        self.stopped = False
        self._held = b""

    def feed(self, piece: bytes) -> bytes:
        """The text certain to precede any stop string; nothing more once `stopped`."""
        if self.stopped:
            return b""
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:  # in bytes, and the first complete one: no later byte may take back shown text
            _, cut = min(found)
            self.stopped, self._held = True, b""
            return text[:cut]
        # the most bytes at the end that begin a stop string
        begun = (n for stop in self.stops for n in range(1, min(len(text) + 1, len(stop))) if text.endswith(stop[:n]))
        keep = max(begun, default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self) -> bytes:
        """The text held back because a stop string could have begun there."""
        held, self._held = self._held, b""
        return held
