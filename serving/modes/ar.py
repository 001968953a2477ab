"""`ar`: the AR pipeline over the same hosts. The last host samples; one token costs one trip round the ring."""

from collections.abc import AsyncGenerator
from functools import partial

import numpy as np

from serving.modes.base import Generation, PipelineMode, count_tokens
from serving.router.accounting import Account
from serving.router.session import Session
from stages.errors import CodecError
from stages.model.codec import HIDDEN
from stages.model.vocabulary import Vocabulary
from stages.v1 import stage_pb2
from stages.wire.status import internal


class ArMode(PipelineMode):
    """Token by token, KV-cached. The last host hands each token to the first host and to the router at once."""

    name = "ar"
    kind = "ar"
    absent = "the hosts have no AR model (no ar/ in their checkpoint)"
    codecs = tuple(HIDDEN)
    default_codec = "fp32"

    async def generate(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        vocabulary = self.tokenizer.vocabulary
        capacity = vocabulary.count(request.prompt) + request.max_tokens - 1  # the last token is never read back
        with Session(self.ring, self.kind, capacity, request.due_at, account) as session:
            # the last host's next is the first host, not the router: a byte costs H trips instead of H + 1
            await session.push(
                stage_pb2.Read(
                    prompt=request.given_tokens,
                    codec=request.codec,
                    sample=stage_pb2.Sample(sampling=request.sampling, remaining=request.max_tokens),
                ),
                request.prompt,
            )
            for left in reversed(range(request.max_tokens)):
                event = await session.event(partial(check_tokens, request=request, vocabulary=vocabulary))
                account.add_sweep(event)
                account.add_text(event.text, event.logprobs)
                account.complete = event.complete
                if ended := event.complete or not request.ends.isdisjoint(vocabulary.tokens(event.text)):
                    left = 0
                if not left:
                    await session.finish()
                yield event.text
                if ended:
                    return


def check_tokens(event: stage_pb2.Event, request: Generation, vocabulary: Vocabulary, most: int = 1) -> None:
    """Raise StatusError unless `event` brings 1 to `most` tokens, and with them what `request` asks to be told."""
    if not 1 <= (count := count_tokens(event, vocabulary, "step")) <= most:
        raise internal(f"a step that may bring {most} tokens came back with {count}")
    if event.complete and not request.json_schema:
        raise internal("a step came back as the end of a text that follows no schema")
    if request.logprobs is None:
        if event.HasField("logprobs"):
            raise internal("a step came back with log-probabilities that nobody asked for")
        return
    told, each = event.logprobs, count * min(request.logprobs, vocabulary.size)
    try:
        named = len(vocabulary.decode(told.top_tokens))
    except CodecError as error:
        raise internal(f"a step came back with nonsense: {error}") from None
    if (len(told.nats), len(told.top_nats), named) != (4 * count, 4 * each, each):
        raise internal(f"a step of {count} tokens came back without their log-probabilities")
    if not (np.frombuffer(told.nats + told.top_nats, "<f4") <= 0).all():  # false for NaN
        raise internal("a step came back with log-probabilities that are none")
