"""`resample`: a drafter generates many candidate outputs, one sweep scores them all, and one is drawn by weight.

One trip carries the whole output, unless the request names a chunk: then N tokens take N / chunk sweeps. This is
sampling importance resampling (stages/model/resampling.py): many candidates give the text the scorer's distribution,
one the drafter's. An imported model's drafter runs on the last host, which also draws and starts the next chunk: after
the prompt's trip, only text and weights come here. A drafter trained with the model runs on the router and saves that
trip: the prompt travels with the first candidates, and each chosen chunk with the next ones.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from serving.modes import SCORERS
from serving.modes.ar import SpeculativeMode
from serving.modes.base import Generation, Mode, book, count_tokens
from serving.modes.local import drafter_problem
from serving.modes.tokenizer import BYTE_TOKENIZER, Tokenizer, Tokenizers
from serving.router.accounting import Account
from serving.router.request import ONE_TEXT
from serving.router.ring import RingView
from serving.router.session import Session
from stages.model.resampling import ImportanceWeights, weigh
from stages.model.scoring import MAX_LOGITS, Floats, max_scored
from stages.model.vocabulary import Vocabulary
from stages.v1 import stage_pb2
from stages.wire.status import failed_precondition, internal, invalid

if TYPE_CHECKING:
    from serving.router.own_models import LocalModel

# Default number. At equal entropy, one trip brings 256 bytes of byte models 28 % of the way from `local` to `ar` in
# judge bits, and 40 % with 64 candidates (docs/research/mode-settings.md).
CANDIDATES = 16
ROUND = 1 << 16  # most random streams per round

REPLACED = (
    "the hosts hold other weights than the checkpoint of the router, whose drafter this mode needs: deploy the hosts' "
    "release here, or restart the router with it"
)
Drawn = AsyncGenerator[tuple[bytes, ImportanceWeights], None]  # pieces of text, and the weights of their candidates


async def score(session: Session, step: stage_pb2.Read, text: bytes) -> tuple[stage_pb2.Event, Floats]:
    """Run a step after `text`; returns the result and ln p of each candidate: (candidates,). Raises StatusError."""
    count, nats = len(step.score.candidates), list[Floats]()
    await session.push(step, text)
    event = await session.event(lambda event: nats.append(read_scores(event.scores.nats, count)))
    return event, nats[-1]


def read_scores(payload: bytes, count: int) -> Floats:
    """ln p of each candidate from a `Scores` message: (count,). Raises StatusError for a malformed one."""
    if len(payload) != 8 * count:
        raise internal(f"the scores of {count} candidates have {len(payload)} bytes")
    nats = np.frombuffer(payload, dtype="<f8").astype(np.float64)
    if np.isnan(nats).any():
        raise internal("the scores of candidates are not numbers: check the hosts' weights")
    return nats


class ResampleMode(Mode):
    """A fixed number of sweeps, one by default, however good the drafter is."""

    name = "resample"
    # int8 by default: 32 candidates of 32 bytes take 162 KB a hop instead of 530 KB, and their shares move by 2 %.
    default_codec = "int8"

    def __init__(self, ring: RingView, drafter: "LocalModel | None", tokenizers: Tokenizers) -> None:
        self.ring, self.local, self.tokenizers = ring, drafter, tokenizers
        self.exact = SpeculativeMode(ring, tokenizers)

    @property
    def problem(self) -> str:
        model = next(iter(self._models.values()), None)
        if model is None:
            return "the hosts have no scorer (neither scorer/ nor ar/ in their checkpoint)"
        replaced = REPLACED if self.ring.replaced else ""
        return self.tokenizers.problem(model) or drafter_problem(self.local, self.tokenizer) or replaced

    @property
    def tokenizer(self) -> Tokenizer:
        return next((self.tokenizers.of(model.digest) for model in self._models.values()), BYTE_TOKENIZER)

    @property
    def served(self) -> list[str]:
        """The hosts' scorers with this mode's tokenizer, by their names in requests."""
        own = self.tokenizer.id
        return [name for name, model in self._models.items() if self.tokenizers.of(model.digest).id == own]

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
        for owner, context in ((f"scorer {name}", model.positions), ("the drafter", self._drafter.positions)):
            request.check_fit(self.tokenizer, context, f"in mode {self.name} {owner}'s")
        if request.temperature == 0:
            raise invalid(ONE_TEXT)
        if request.max_distance is not None and (problem := self.exact.problem):
            raise failed_precondition(f"max_distance needs ar-speculative, which writes above it: {problem}")
        self._check_candidates(request, model.width)

    def _check_candidates(self, request: Generation, width: int) -> None:
        """Raise StatusError if hosts (by the scorer's width) or the drafter lack room for the candidates."""
        chunk, candidates = self._sizes(request)
        noun, most, fit = self.tokenizer.noun, max_scored(width), self._fit(chunk)
        one, room = f"{chunk} {noun}", "the drafter has memory" if self.is_near else "a message to the hosts has room"
        if chunk > most:
            raise invalid(
                f"a chunk of {one} does not fit a message to the hosts (at most {most} {noun}): give a smaller one"
            )
        if not fit:
            raise invalid(f"the drafter has no memory for a chunk of {one}: give a smaller one")
        if candidates > fit:
            raise invalid(
                f"{candidates} candidates of {one} are too many: {room} for at most {fit}; "
                "give fewer candidates, or a smaller chunk"
            )

    async def generate(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        name, vocabulary = self._scorer(request), self.tokenizer.vocabulary
        account.scorer = name
        most = 1.0 if request.max_distance is None else request.max_distance
        text, left = request.prompt, request.max_tokens
        # candidates are not cached, so the hosts need no room for the last chunk
        capacity = vocabulary.count(text) + left - 1
        with Session(self.ring, SCORERS[name], capacity, request.due_at, account) as session:
            write = self._on_hosts if not self.is_near and self._sizes(request)[0] > 1 else self._at_router
            async with aclosing(write(session, request, account)) as drawn:
                async for piece, weights in drawn:
                    # the sum bounds the total distance
                    bound = min(account.distance_bound + weights.distance_bound, 1.0)
                    if bound > most:
                        break
                    account.distance_bound = bound
                    piece, left = await book(session, request, piece, left)
                    yield piece
                    if not left:
                        return
                    text += piece
        account.reason = (
            f"{account.output_tokens} {self.tokenizer.noun} are of mode {self.name}, the rest of {self.exact.name}: "
            f"the distance bound would be {bound:.2f}, above the max_distance of {most:g}"
        )
        codec = request.codec if "codec" in request.given else self.exact.default_codec
        rest = replace(request, prompt=text, max_tokens=left, codec=codec)
        async with aclosing(self.exact.generate(rest, account)) as pieces:
            async for piece in pieces:
                yield piece

    async def _at_router(self, session: Session, request: Generation, account: Account) -> Drawn:
        """Yield chunks drawn among candidates of the router's own model."""
        from stages.backends.whole_model import Continuations

        (chunk, candidates), vocabulary = self._sizes(request), self.tokenizer.vocabulary
        text, left, number = request.prompt, request.max_tokens, 0
        known = self._drafter.open(vocabulary.count(text) + left)
        while left:
            length = min(chunk, left)
            written = Continuations(
                known, text, request.temperature, request.seed, length, candidates, first=number * ROUND
            )
            drafted = await self._drafter.draft(written, request.due_at)
            scoring = stage_pb2.Score(temperature=request.temperature, candidates=drafted.texts)
            event, nats = await score(session, stage_pb2.Read(codec=request.codec, score=scoring), text)
            account.add_sweep(event)
            weights = weigh(nats, drafted.nats.sum(axis=1), length)
            account.add_candidates(weights, length, drafted.compute_ms)
            piece = drafted.texts[weights.choose(request.seed, vocabulary.count(text))]
            yield piece, weights
            text, left, number = text + piece, left - length, number + 1

    async def _on_hosts(self, session: Session, request: Generation, account: Account) -> Drawn:
        """Yield chunks that the last host draws among its own candidates."""
        (chunk, candidates), vocabulary = self._sizes(request), self.tokenizer.vocabulary
        left, empty, drawn = request.max_tokens, 0, list[ImportanceWeights | None]()

        def check(event: stage_pb2.Event) -> None:
            drawn.append(read_drawn(event, vocabulary, min(chunk, left), candidates))
            if drawn[-1] is None and empty > account.replays:
                raise internal("a step returned no text")

        scoring = stage_pb2.Score(
            temperature=request.temperature,
            seed=request.seed,
            remaining=left,
            drafting=stage_pb2.Drafting(most=chunk, branches=candidates),
        )
        prompt = vocabulary.count(request.prompt)
        await session.push(stage_pb2.Read(prompt=prompt, codec=request.codec, score=scoring), request.prompt)
        while left:
            event = await session.event(check)
            account.add_sweep(event)
            if (weights := drawn[-1]) is None:
                empty += 1
                continue
            account.add_candidates(weights, min(chunk, left))
            left -= min(chunk, left)
            yield event.text, weights

    @property
    def is_near(self) -> bool:
        """True if the drafter was trained like the scorer: it is on the router, and its candidates are close.

        No imported model's checkpoint has a scorer trained block by block, whatever its tokenizer.
        """
        return self.tokenizer is BYTE_TOKENIZER or self.ring.model("scorer") is not None

    def _sizes(self, request: Generation) -> tuple[int, int]:
        """Chunk and number of candidates. Nothing is learnt from requests: a text would depend on earlier ones."""
        usual = request.whole(self.tokenizer.vocabulary)
        if not self.is_near:  # as long as the candidates fit into a message
            usual = max(min(usual, max_scored(self._models["ar"].width) // (request.candidates or CANDIDATES)), 1)
        chunk = min(request.chunk or usual, request.max_tokens)
        return chunk, request.candidates or max(1, min(CANDIDATES, self._fit(chunk)))

    def _fit(self, length: int) -> int:
        """Most candidates of `length` tokens."""
        if self.is_near:
            return self._drafter.max_branches(length)
        return min(max_scored(self._models["ar"].width) // length, MAX_LOGITS // self.tokenizer.vocabulary.size)

    def _scorer(self, request: Generation) -> str:
        """The scorer that `request` names, or the default. Meaningful while there is no `problem`."""
        return request.scorer or self.served[0]

    @property
    def _drafter(self) -> "LocalModel":
        """The router's own model. Meaningful as above."""
        assert self.local is not None
        return self.local

    @property
    def _models(self) -> dict[str, stage_pb2.ModelInfo]:
        found = {name: self.ring.model(kind) for name, kind in SCORERS.items()}
        return {name: model for name, model in found.items() if model is not None}


def read_drawn(event: stage_pb2.Event, vocabulary: Vocabulary, length: int, count: int) -> ImportanceWeights | None:
    """Weights of the candidates among which a host drew `length` tokens of text; None for the first step, which has no
    text. Raises StatusError for any other result."""
    if not (written := count_tokens(event, vocabulary, "step")):
        return None
    if written != length:
        raise internal(f"a step that draws {length} tokens returned {written}")
    nats, drafter_nats = (read_scores(each, count) for each in (event.candidates.nats, event.candidates.drafter_nats))
    if not np.isfinite(drafter_nats).all():
        raise internal("the hosts returned candidates that their drafter cannot have written")
    return weigh(nats, drafter_nats, length)
