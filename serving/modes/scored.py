"""A drafter at the router, and hosts that score its texts."""

from functools import partial

from serving.modes import MODEL, SCORERS
from serving.modes.base import Generation, Mode
from serving.modes.candidates import Floats, check_scores, read_scores
from serving.modes.drafters.local_model import LocalModel, drafter_problem
from serving.modes.tokenizer import BYTE_TOKENIZER, Tokenizer, Tokenizers
from serving.router.ring import RingView
from serving.router.session import Session
from stages.model.codec import HIDDEN
from stages.model.scoring import most_scored
from stages.v1 import stage_pb2
from stages.wire.status import failed_precondition, invalid

FOLDERS = {"scorer": "scorer/", "ar": "ar/"}


async def score(session: Session, step: stage_pb2.Read) -> tuple[stage_pb2.Event, Floats]:
    """The result of a step, and ln p of each of its candidates: (candidates,). Raises Refusal."""
    count = len(step.score.candidates)
    await session.push(step)
    event = await session.event(partial(check_scores, count=count))
    return event, read_scores(event.scores.nats, count)


class ScoredMode(Mode):
    """A mode whose text comes from the drafter, and whose quality from the scorer."""

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
        return next((self.tokenizers.of(model) for model in self._models.values()), BYTE_TOKENIZER)

    @property
    def served(self) -> list[str]:
        """Scorers of the hosts that read this mode's symbols, by the name that a request has for them."""
        ours = self.tokenizer.id
        return [name for name, model in self._models.items() if self.tokenizers.of(model).id == ours]

    @property
    def positions(self) -> int:
        return max((self._models[name].positions for name in self.served), default=0)

    def scorer(self, request: Generation) -> str:
        """The scorer that `request` asks for, or the default. Meaningful while there is no `problem`."""
        return request.scorer or self.served[0]

    @property
    def drafter(self) -> LocalModel:
        """The router's own model. Meaningful as above."""
        assert self.local is not None
        return self.local

    def check(self, request: Generation) -> None:
        name = self.scorer(request)
        model = self._models.get(name)
        if model is None or name not in self.served:
            raise failed_precondition(
                f"scorer {name!r} cannot be served: the hosts have no {FOLDERS[SCORERS[name]]} in their checkpoint; "
                f"choose from {', '.join(self.served)}"
            )
        if request.drafter not in (None, MODEL):
            raise failed_precondition(f"mode {self.name} has no drafter {request.drafter!r} here; choose from {MODEL}")
        alphabet, noun = self.tokenizer.alphabet, self.tokenizer.noun
        prompt = alphabet.count(request.prompt)
        need = prompt + request.max_symbols
        for who, context in ((f"scorer {name!r}", model.positions), ("the drafter", self.drafter.positions)):
            if need > context:
                raise invalid(
                    f"prompt ({prompt} {noun}) and output ({request.max_symbols}) need a context of {need} {noun} in "
                    f"mode {self.name}, {who} has {context}: shorten one of them"
                )

    def width(self, request: Generation) -> int:
        """Width of the scorer's hidden states. Meaningful as above."""
        return self._models[self.scorer(request)].width

    def most_candidates(self, request: Generation, length: int) -> int:
        """Candidates of `length` symbols that a step of `request` may have: nothing is drafted for more."""
        return self.drafter.most_branches(length)

    def check_candidates(self, request: Generation, count: int, length: int) -> None:
        """Raise Refusal where hosts or the drafter have no room for so many candidates of `length` symbols."""
        noun, most = self.tokenizer.noun, most_scored(self.width(request))
        each = f"{length} {noun}"
        if length > most:
            raise invalid(
                f"a candidate of {each} is more than a message to the hosts holds ({most} {noun}): give a smaller chunk"
            )
        fit = self.most_candidates(request, length)
        if not fit:
            raise invalid(f"the drafter has no memory for a candidate of {each}: give a smaller chunk")
        if count > fit:
            raise invalid(
                f"{count} candidates of {each} are more than the drafter has memory for: at most {fit} fit, "
                f"so give {fit} candidates or fewer, or a smaller chunk"
            )

    def step(
        self, request: Generation, number: int, read: int, clean: bytes, candidates: list[bytes]
    ) -> stage_pb2.Read:
        """:param read: symbols that the hosts have read."""
        return stage_pb2.Read(
            number=number,
            start=read,
            clean=clean,
            codec=request.codec,
            score=stage_pb2.Score(temperature=request.temperature, candidates=candidates),
        )

    @property
    def _models(self) -> dict[str, stage_pb2.ModelInfo]:
        """The hosts' models that can score."""
        found = {name: self.ring.model(kind) for name, kind in SCORERS.items()}
        return {name: model for name, model in found.items() if model is not None}
