"""`ar`: the AR pipeline over the same hosts. The last host samples; a token costs one trip round the ring, and less
in `ar-speculative`."""

import math
from collections.abc import AsyncGenerator
from functools import partial

import numpy as np

from serving.modes.base import Generation, PipelineMode, book, count_tokens
from serving.router.accounting import Account, Drawn, drawn_tokens
from serving.router.session import Session
from stages.errors import CodecError
from stages.model.draft_tree import MAX_DRAFT_TREE
from stages.model.scoring import MAX_LOGITS
from stages.model.vocabulary import Vocabulary
from stages.v1 import stage_pb2
from stages.wire.status import internal

SCORED_AT_ONCE = 128  # prompt tokens


class ArMode(PipelineMode):
    """Token by token, with KV caches. The last host sends each token to the first host and the router at once."""

    name = "ar"
    kind = "ar"
    absent = "the hosts have no AR model (no ar/ in their checkpoint)"
    default_codec = "fp32"
    drafts = 0  # most draft tokens of the last host per trip

    async def generate(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        vocabulary, left = self.tokenizer.vocabulary, request.max_tokens
        capacity = vocabulary.count(request.prompt) + left - 1  # the last token is never read back
        with Session(self.ring, self.kind, capacity, request.due_at, account) as session:
            if request.score_prompt:
                await self._score(session, request, account)
            drafting = stage_pb2.Drafting(most=request.draft or 0, branches=request.branches or 0)
            # the last host sends to the first host, not through the router: a byte costs H trips instead of H + 1
            await session.push(
                stage_pb2.Read(
                    # scored tokens were read as if generated, which rounds differently: so replays read them that way
                    prompt=1 if request.score_prompt else request.given_tokens,
                    codec=request.codec,
                    sample=stage_pb2.Sample(
                        sampling=request.sampling, remaining=left, drafting=drafting if self.drafts else None
                    ),
                ),
                request.prompt,
            )
            while left:
                most = min(left, self.drafts + 1)
                event = await session.event(partial(check_tokens, request=request, vocabulary=vocabulary, most=most))
                right = vocabulary.count(event.text) - 1
                if self.drafts:
                    account.add_draft(max(event.drafted, right), right)
                account.add_sweep(event)
                account.complete = event.complete
                piece, left = await book(session, request, event.text, left, event.logprobs)
                yield piece

    async def _score(self, session: Session, request: Generation, account: Account) -> None:
        """Record the logprobs of the prompt's tokens, equal to the last bit to those of `ar` generating them."""
        vocabulary, total = self.tokenizer.vocabulary, request.given_tokens
        most = min(SCORED_AT_ONCE, MAX_LOGITS // vocabulary.size - 1)
        # logprobs are the model's own, before any sampling settings
        plain = stage_pb2.Sampling(seed=request.seed, temperature=request.temperature, logprobs=request.logprobs)
        account.prompt_logprobs = [Drawn(vocabulary.tokens(request.prompt)[0], math.nan, [])]
        for known in range(1, total, most):
            # they travel as draft tokens, all of them accepted; the token sampled after them is not used
            given = vocabulary.cut(request.prompt, known, min(known + most, total))
            count = vocabulary.count(given)

            def check(event: stage_pb2.Event, given: bytes = given, count: int = count) -> None:
                check_tokens(event, request, vocabulary, count + 1)
                if vocabulary.count(event.text) != count + 1 or not event.text.startswith(given):
                    raise internal("the hosts did not return the tokens of the prompt")

            sample = stage_pb2.Sample(sampling=plain, draft=count, given=True)
            step = stage_pb2.Read(prompt=1, codec=request.codec, sample=sample)
            await session.push(step, vocabulary.cut(request.prompt, 0, known), given)
            event = await session.event(check)
            account.add_sweep(event)
            account.prompt_logprobs += drawn_tokens(vocabulary, event.text, event.logprobs)[:count]
            session.journal.kept = count - 1  # the last one is read again, since a step needs a known token


# At every draft token the hosts sample with the random numbers that `ar` would use there, and accept drafts that match.
# Rejection sampling would accept little more and generate a different text.
class SpeculativeMode(ArMode):
    """The last host drafts the next tokens and starts each trip itself; one trip verifies many, and text comes here.

    Exact: every token is the one that the pipeline itself samples at its position, so the text equals that of `ar`.
    """

    name = "ar-speculative"
    drafts = MAX_DRAFT_TREE


def check_tokens(event: stage_pb2.Event, request: Generation, vocabulary: Vocabulary, most: int = 1) -> None:
    """Raise StatusError unless `event` brings 1 to `most` tokens, with the logprobs that `request` asks for."""
    if not 1 <= (count := count_tokens(event, vocabulary, "step")) <= most:
        raise internal(f"a step for at most {most} tokens returned {count}")
    if event.complete and not request.json_schema:
        raise internal("a step reported the end of a schema, but the request has none")
    if request.logprobs is None:
        if event.HasField("logprobs"):
            raise internal("a step returned log-probabilities that were not requested")
        return
    logprobs, each = event.logprobs, count * min(request.logprobs, vocabulary.size)
    try:
        named = len(vocabulary.tokens(logprobs.top_tokens))
    except CodecError as error:
        raise internal(f"a step returned invalid data: {error}") from None
    if (len(logprobs.nats), len(logprobs.top_nats), named) != (4 * count, 4 * each, each):
        raise internal(f"a step of {count} tokens returned a wrong number of log-probabilities")
    if not (np.frombuffer(logprobs.nats + logprobs.top_nats, "<f4") <= 0).all():  # false for NaN
        raise internal("a step returned invalid log-probabilities")
