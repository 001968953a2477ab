"""`resample`: the drafter writes many candidates of the output, one sweep scores them all, and one is drawn by weight.

One trip carries the whole output, unless the request names a chunk: then N tokens take N / chunk sweeps, the prompt
travels with the first candidates, and the chosen chunk with the next ones. Sampling importance resampling (see
serving/modes/candidates.py): with many candidates the text has the scorer's distribution, with one the drafter's.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from serving.modes import SCORERS
from serving.modes.base import Generation, Mode
from serving.modes.candidates import Floats, read_scores, weigh, write_candidates
from serving.modes.drafters.local_model import LocalModel, LocalSequence, drafter_problem
from serving.modes.tokenizer import BYTE_TOKENIZER, Tokenizer, Tokenizers
from serving.router.accounting import Account
from serving.router.ring import RingView
from serving.router.session import Session
from stages.model.codec import HIDDEN
from stages.model.scoring import most_scored
from stages.v1 import stage_pb2
from stages.wire.status import failed_precondition, invalid


async def score(session: Session, step: stage_pb2.Read, text: bytes) -> tuple[stage_pb2.Event, Floats]:
    """The result of a step after `text`, and ln p of each of its candidates: (candidates,). Raises StatusError."""
    count, nats = len(step.score.candidates), list[Floats]()
    await session.push(step, text)
    event = await session.event(lambda event: nats.append(read_scores(event.scores.nats, count)))
    return event, nats[-1]


@dataclass(frozen=True)
class ResampleSizes:
    """Sizes of a request that names none."""

    # None = the whole output.
    chunk: int | None
    candidates: int
    # Temperature of the drafter, as a multiple of the request's.
    coolness: float = 1.0


# Models that were trained here, as was their drafter. Of the way from `local` to `ar` in judge bits, at equal entropy,
# 256 bytes of models of bytes go 28 % in one trip, with 64 candidates 40 % (docs/research/mode-settings.md).
OWN = ResampleSizes(chunk=None, candidates=16)
# Imported models. About 2^KL candidates are needed for a chunk (Chatterjee and Diaconis 2018, arXiv 1511.01437), and a
# distilled drafter is 2.9 bits a token away. With twelve, 128 tokens take eleven trips, less than a tenth of those of
# `ar`. Such a drafter gives too much to the many unlikely tokens, so it draws a little colder; the weights know.
IMPORTED = ResampleSizes(chunk=12, candidates=32, coolness=0.9)


class ResampleMode(Mode):
    """A fixed number of sweeps, one by default, whatever the drafter is worth."""

    name = "resample"
    # int8 by default: 32 candidates of 32 bytes take 162 KB a hop instead of 530 KB, and their shares move by 2 %.
    codecs = tuple(HIDDEN)

    def __init__(self, ring: RingView, drafter: LocalModel | None, tokenizers: Tokenizers) -> None:
        self.ring, self.local, self.tokenizers = ring, drafter, tokenizers

    @property
    def problem(self) -> str:
        model = next(iter(self._models.values()), None)
        if model is None:
            return "the hosts have no scorer (neither scorer/ nor ar/ in their checkpoint)"
        return self.tokenizers.problem(model) or drafter_problem(self.local, self.tokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        return next((self.tokenizers.of(model.digest) for model in self._models.values()), BYTE_TOKENIZER)

    @property
    def served(self) -> list[str]:
        """Scorers of the hosts that read this mode's tokens, by the name that a request has for them."""
        ours = self.tokenizer.id
        return [name for name, model in self._models.items() if self.tokenizers.of(model.digest).id == ours]

    @property
    def positions(self) -> int:
        return max((self._models[name].positions for name in self.served), default=0)

    def check(self, request: Generation) -> None:
        name = self._scorer(request)
        model = self._models.get(name)
        if model is None or name not in self.served:
            raise failed_precondition(
                f"scorer {name!r} cannot be served: the hosts have no {SCORERS[name]}/ in their checkpoint; "
                f"choose from {', '.join(self.served)}"
            )
        vocabulary, noun = self.tokenizer.vocabulary, self.tokenizer.noun
        prompt = vocabulary.count(request.prompt)
        need = prompt + request.max_tokens
        for who, context in ((f"scorer {name!r}", model.positions), ("the drafter", self._drafter.positions)):
            if need > context:
                raise invalid(
                    f"prompt ({prompt} {noun}) and output ({request.max_tokens}) need a context of {need} {noun} in "
                    f"mode {self.name}, {who} has {context}: shorten one of them"
                )
        if request.temperature == 0:
            raise invalid(
                "mode resample chooses among random candidates, and at temperature 0 all are the same: "
                "give a temperature above 0, or use mode ar"
            )
        self._check_candidates(request, model.width)

    def _check_candidates(self, request: Generation, width: int) -> None:
        """Raise StatusError where hosts, by the scorer's width, or the drafter have no room for the candidates."""
        chunk, candidates = self._sizes(request)
        noun, most = self.tokenizer.noun, most_scored(width)
        each = f"{chunk} {noun}"
        if chunk > most:
            raise invalid(
                f"a candidate of {each} is more than a message to the hosts holds ({most} {noun}): give a smaller chunk"
            )
        fit = self._drafter.most_branches(chunk)
        if not fit:
            raise invalid(f"the drafter has no memory for a candidate of {each}: give a smaller chunk")
        if candidates > fit:
            raise invalid(
                f"{candidates} candidates of {each} are more than the drafter has memory for: at most {fit} fit, "
                f"so give {fit} candidates or fewer, or a smaller chunk"
            )

    async def generate(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        name, (chunk, candidates) = self._scorer(request), self._sizes(request)
        account.scorer, vocabulary = name, self.tokenizer.vocabulary
        reach = vocabulary.count(request.prompt) + request.max_tokens
        temperature = self._usual.coolness * request.temperature
        sequence = LocalSequence(self._drafter, reach, temperature, request.seed, request.due_at)
        # candidates are not remembered, so of the last chunk the hosts need to cache nothing
        capacity = reach - 1
        with Session(self.ring, SCORERS[name], capacity, request.due_at, account) as session:
            # one text is carried on: 4, 8 and 32 of them at equal candidates closed no more of the gap to the scorer
            # (101, 108, 104 % against 107 +- 4 %), and would double what travels
            text, left, number = request.prompt, request.max_tokens, 0
            while True:
                drafted = await write_candidates(sequence, text, min(chunk, left), candidates, number)
                scoring = stage_pb2.Score(temperature=request.temperature, candidates=drafted.texts)
                event, nats = await score(session, stage_pb2.Read(codec=request.codec, score=scoring), text)
                weights = weigh(drafted, nats)
                piece = drafted.texts[weights.choose(request.seed, vocabulary.count(text))]
                account.add_sweep(event)
                account.add_candidates(drafted, weights)
                piece, ended = request.until_end(piece, vocabulary)
                account.add_text(piece)
                left -= vocabulary.count(piece)
                if ended := ended or not left:
                    await session.finish()
                yield piece
                if ended:
                    return
                text, number = text + piece, number + 1

    @property
    def is_near(self) -> bool:
        """True if the drafter was trained as the scorer was, so that a few candidates of a whole text are enough.

        A scorer trained block by block is in no imported model's checkpoint, whatever its tokens are.
        """
        return self.tokenizer is BYTE_TOKENIZER or self.ring.model("scorer") is not None

    @property
    def _usual(self) -> ResampleSizes:
        return OWN if self.is_near else IMPORTED

    def _sizes(self, request: Generation) -> tuple[int, int]:
        """Chunk and candidates. Nothing is learnt over requests: a text would depend on who asked before."""
        usual = self._usual.chunk or request.whole(self.tokenizer.vocabulary)
        chunk = min(request.chunk or usual, request.max_tokens)
        return chunk, request.candidates or max(1, min(self._usual.candidates, self._drafter.most_branches(chunk)))

    def _scorer(self, request: Generation) -> str:
        """The scorer that `request` asks for, or the default. Meaningful while there is no `problem`."""
        return request.scorer or self.served[0]

    @property
    def _drafter(self) -> LocalModel:
        """The router's own model. Meaningful as above."""
        assert self.local is not None
        return self.local

    @property
    def _models(self) -> dict[str, stage_pb2.ModelInfo]:
        found = {name: self.ring.model(kind) for name, kind in SCORERS.items()}
        return {name: model for name, model in found.items() if model is not None}
