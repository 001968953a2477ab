"""The router's gRPC service."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import asdict
from importlib.metadata import version
from typing import Any, TypeVar

import grpc.aio
from asyncio_throttle.throttler import Throttler

from serving.drawing.modes import check_drawing, check_drawing_mode, retry_drawing
from serving.modes import AUTO, DRAWING_MODES, PICTURES_SERVED, metric_mode
from serving.modes.base import words_of
from serving.modes.output_text import OutputText
from serving.modes.tokenizer import BYTE_TOKENIZER, Tokenizer
from serving.router.accounting import Account, Drawn
from serving.router.active_release import ActiveRelease
from serving.router.admission import Admission, PlaceRequest
from serving.router.audit import WRONG_SO_FAR, retry_after_audit
from serving.router.records import UNKNOWN_MODE, RequestRecord, RouterCounters
from serving.router.request import DEFAULT_TIMEOUT_S, MAX_TIMEOUT_S, PRIORITIES
from serving.router.rollout import Report, Rollout
from serving.router.validation import (
    TOKEN_BYTES,
    PromptPools,
    check_fit,
    check_mode,
    check_request,
    check_served,
    check_size,
    check_text,
    encoded,
    parsed_chat,
    prompt_bytes,
    tokenized,
)
from serving.v1 import router_pb2, router_pb2_grpc
from stages.checkpoint.release_transfer import drain_requests
from stages.clock import monotonic
from stages.v1 import stage_pb2
from stages.wire.link_quality import LinkRecord
from stages.wire.status import Context, StatusError, check_protocol, data_loss, failed_precondition, ignoring_ended_call
from stages.wire.tls import Expiry
from stages.wire.tokens import ADMIN, GENERATE, STATUS, Key, Keyring

R = TypeVar("R")
Q = TypeVar("Q", router_pb2.GenerateRequest, router_pb2.DrawRequest)
ROUTER = "this router"
VERSION = version("onesweep")  # read once: looking it up takes longer than the rest of a Status answer


class RouterService(router_pb2_grpc.RouterServiceServicer):
    """Admits requests, runs their mode, streams their text and closes their account."""

    def __init__(self, rollout: Rollout, keyring: Keyring, admission: Admission) -> None:
        """:param keyring: the keys that may send requests.
        :param admission: limits how many run at once."""
        self.rollout, self.ring = rollout, rollout.ring
        self.keyring, self.admission = keyring, admission
        self.counters, self.prompts = RouterCounters(self.ring.counters), PromptPools()
        self.expiry = Expiry(self.ring.security.tls)
        self._pace = Throttler(rate_limit=admission.settings.requests_per_s, period=1.0)

    def Generate(
        self, request: router_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        mode = request.mode if request.mode in self.rollout.current.modes else UNKNOWN_MODE
        return self._recorded(mode, request, context, self._admit)

    def Draw(self, request: router_pb2.DrawRequest, context: Context) -> AsyncIterator[router_pb2.DrawResponse]:
        mode = metric_mode(request.mode or "chain") if (request.mode or "chain") in DRAWING_MODES else UNKNOWN_MODE
        return self._recorded(mode, request, context, self._draw)

    async def _recorded(
        self, mode: str, request: Q, context: Context, serve: Callable[[Q, RequestRecord, Key], AsyncGenerator[R, None]]
    ) -> AsyncGenerator[R, None]:
        """Yield the answer to a request, recorded under its name in the logs."""
        left_s = context.time_remaining()
        due_at = monotonic() + min(DEFAULT_TIMEOUT_S if left_s is None else left_s, MAX_TIMEOUT_S)
        record = RequestRecord(mode, due_at, self.counters)
        with ignoring_ended_call():
            await context.send_initial_metadata(record.metadata)
        context.set_trailing_metadata(record.metadata)
        with record:
            check_protocol(request.protocol, ROUTER)
            record.return_s = 0.0 if request.has_other else record.return_s
            key = self.keyring.identify(context.invocation_metadata(), GENERATE)
            async with aclosing(serve(request, record, key)) as responses:
                async for response in responses:
                    yield response

    def Deploy(
        self, requests: AsyncIterator[router_pb2.DeployRequest], context: Context
    ) -> AsyncIterator[router_pb2.DeployProgress]:
        return self._progress_of(lambda report: self.rollout.deploy(requests, report), context, requests)

    def Rollback(
        self, request: router_pb2.RollbackRequest, context: Context
    ) -> AsyncIterator[router_pb2.DeployProgress]:
        return self._progress_of(self.rollout.rollback, context)

    async def Status(self, request: router_pb2.StatusRequest, context: Context) -> router_pb2.StatusResponse:
        check_protocol(request.protocol, ROUTER)
        self.keyring.identify(context.invocation_metadata(), STATUS)
        return self.status()

    async def Tokenize(self, request: router_pb2.TokenizeRequest, context: Context) -> router_pb2.TokenizeResponse:
        check_protocol(request.protocol, ROUTER)
        key, modes = self.keyring.identify(context.invocation_metadata(), GENERATE), self.rollout.current.modes
        mode = check_mode(request.mode, modes)
        check_served(mode, modes)
        check_size(len(request.text), mode)
        size, left_s = len(request.text) + TOKEN_BYTES * len(request.tokens), context.time_remaining()
        async with self._placed(PlaceRequest(key, size, DEFAULT_TIMEOUT_S if left_s is None else left_s)) as place:
            place.spent_bytes += size
            answer = await self.prompts.tokenized(key.name, mode.tokenizer, _tokenized, mode.tokenizer, request)
        answer.context_tokens = mode.positions
        return answer

    def status(self) -> router_pb2.StatusResponse:
        """The current state of the router and its hosts."""
        served, frontier = self.rollout.current, self.rollout.current.frontier
        names = {link.entry.address: link.entry.name for link in self.ring.links}
        record = LinkRecord.read(self.ring.run)  # read each time (56 us), since the rendezvous is another process
        pairs = [(link.entry.name, names[to]) for link in self.ring.links for to in link.onward if to in names]
        trips_ms = {link.entry.name: (link.relay.min_rtt_ms or 0.0) / 2 for link in self.ring.links}
        tokenizers = [served.modes[name].tokenizer for name in served.served_modes]
        return router_pb2.StatusResponse(
            version=VERSION,
            ready=not served.view.problem,
            hosts=[
                router_pb2.HostStatus(
                    name=link.entry.name,
                    address=link.entry.address,
                    blocks=link.entry.blocks,
                    ready=not link.problem,
                    reason=link.problem,
                    lost=link.lost_at is not None,
                    rtt_ms=link.relay.rtt_ms or 0.0,
                    sessions=info.counters.sessions,
                    session_bytes=info.counters.session_bytes,
                    queued=info.counters.queued,
                    queue_limit=info.counters.queue_limit,
                    backend=info.backend,
                    links=[
                        router_pb2.LinkStatus(
                            to=(to := names.get(each.address, each.address)),
                            rtt_ms=each.rtt_ms,
                            problem=each.problem,
                            kind=record.kinds.get((link.entry.name, to), ""),
                            relayed_bytes=record.relayed_bytes.get(frozenset((link.entry.name, to)), 0),
                        )
                        for each in info.links
                    ],
                    releases=[release.name for release in link.held.values()],
                    warning="; ".join(filter(None, (*link.warnings, self.rollout.other_release(link)))),
                )
                for link in self.ring.links
                for info in [link.info or stage_pb2.DescribeResponse()]
            ],
            modes=served.served_modes,
            drawing_modes=served.drawing_modes,
            chain_digest=served.view.digest("chain"),
            ar_digest=served.view.digest("ar"),
            scorer_digest=served.view.digest("scorer"),
            release=served.release,
            previous=self.rollout.previous_name,
            context_tokens=max((served.modes[name].positions for name in served.served_modes), default=0),
            audits=router_pb2.Audits(**asdict(self.ring.auditor.counters)),
            requests=self.admission.requests,
            request_limit=self.admission.settings.request_limit,
            judge_bits=frontier.usual_bits() if frontier else None,
            human_bits=(frontier.human_bits if frontier else None) or 0.0,
            pictures=served.pictures,
            model=next((each.model_name for each in tokenizers if each.model_name), ""),
            sampling=next((words_of(each.sampling) for each in tokenizers if each.sampling), ""),
            chat=any(each.chats for each in tokenizers),
            advice=record.advice_on(pairs, trips_ms),
            certificate_until_s=self.expiry.until_s(),
        )

    async def _progress_of(
        self,
        job: Callable[[Report], Coroutine[Any, Any, router_pb2.Switch]],
        context: Context,
        requests: AsyncIterator[router_pb2.DeployRequest] | None = None,
    ) -> AsyncGenerator[router_pb2.DeployProgress, None]:
        """Yield a job's progress as it comes, then its result; the job ends when the client leaves."""
        # the job has its own task: a client that leaves ends it, and a slow reader does not hold it up
        pending: asyncio.Queue[router_pb2.DeployProgress | None] = asyncio.Queue()
        task: asyncio.Task[router_pb2.Switch] | None = None
        try:
            self.keyring.identify(context.invocation_metadata(), ADMIN)
            task = asyncio.create_task(job(pending.put_nowait))
            task.add_done_callback(lambda _: pending.put_nowait(None))
            while (progress := await pending.get()) is not None:
                yield progress
            yield router_pb2.DeployProgress(switch=task.result())
        except StatusError:
            if requests is not None:
                yield router_pb2.DeployProgress(store=stage_pb2.StoreResponse(refused=True))
                await drain_requests(requests)
            raise
        finally:
            if task is not None:
                task.cancel()

    @asynccontextmanager
    async def _placed(self, request: PlaceRequest) -> AsyncIterator[PlaceRequest]:
        """Hold a place for one request during a `with` block. Raises StatusError."""
        answered = asyncio.Event()
        request.answered = answered.set
        self.admission.ask(request, monotonic(), time.time())
        try:
            if request.state == "waits":
                with suppress(TimeoutError):
                    async with asyncio.timeout(request.wait_s):
                        await answered.wait()
            self.admission.begin(request, monotonic())
            async with self._pace:
                yield request
        finally:
            self.admission.leave(request, monotonic())

    async def _admit(
        self, request: router_pb2.GenerateRequest, record: RequestRecord, key: Key
    ) -> AsyncGenerator[router_pb2.GenerateResponse, None]:
        """A request ends on the release that it began with, whatever is deployed meanwhile."""
        record.space, record.caller = key.space(self.ring.owner), key.name
        record.batch = batch = request.priority == PRIORITIES[1]
        size, most = prompt_bytes(request), request.max_bytes or TOKEN_BYTES * request.max_tokens
        async with self._placed(PlaceRequest(key, size + most, record.left_s, batch)) as place:
            place.spent_bytes += size
            served = self.rollout.current
            served.requests += 1
            try:
                async with aclosing(self._generate(request, record, served)) as responses:
                    async for response in responses:
                        yield response
            finally:  # text generated for a whole answer counts even if the client did not wait for it
                served.requests -= 1
                place.spent_bytes += record.account.output_bytes

    async def _draw(
        self, request: router_pb2.DrawRequest, record: RequestRecord, key: Key
    ) -> AsyncGenerator[router_pb2.DrawResponse, None]:
        """Yield previews as they come, then the pictures and their account. Raises StatusError."""
        served = self.rollout.current
        mode = check_drawing_mode(request.mode, served.drawing)
        if mode.uses_hosts:
            await served.view.usable(record.due_at, record.return_s)
        order = check_drawing(request, mode, served.drawing, record.due_at)
        account = record.account = Account(record)
        served.requests += 1
        try:
            async with self._placed(PlaceRequest(key, order.size, record.left_s)) as place:
                place.spent_bytes += order.size  # a caller that leaves early pays too: hosts computed for it
                previews = asyncio.Queue[stage_pb2.Pictures | None]()
                task = asyncio.create_task(retry_drawing(order, account, previews.put_nowait))
                task.add_done_callback(lambda _: previews.put_nowait(None))
                try:
                    while (shown := await previews.get()) is not None:
                        yield router_pb2.DrawResponse(pictures=order.pictures(shown.pixels, shown.block, preview=True))
                    pixels = task.result()
                except StatusError as error:
                    if error.code is not grpc.StatusCode.DEADLINE_EXCEEDED:  # the client's own deadline
                        place.spent_bytes -= order.size
                    raise
                finally:
                    task.cancel()
                account.output_bytes = len(pixels)
        finally:
            served.requests -= 1
        summary = record.summary = order.summary(account)
        summary.request = record.name
        yield router_pb2.DrawResponse(pictures=order.pictures(pixels))
        yield router_pb2.DrawResponse(summary=summary)

    async def _generate(
        self, request: router_pb2.GenerateRequest, record: RequestRecord, served: ActiveRelease
    ) -> AsyncGenerator[router_pb2.GenerateResponse, None]:
        mode = check_mode(request.mode, served.modes)
        generation = check_request(request, mode, record.due_at)
        account = record.account = Account(record, trips=[] if request.trips else None)
        if mode.uses_hosts:
            await served.view.usable(record.due_at, record.return_s)
        chat = parsed_chat(request)
        if served.pictures is not None:
            raise failed_precondition(PICTURES_SERVED)
        check_served(mode, served.modes)
        generation = await tokenized(generation, chat, mode, account, self.prompts)
        if mode.name != AUTO:  # the chosen mode brings its own sampling
            generation = generation.sampled_for(mode)
            account.sampling = generation.sampling_words
        check_fit(generation, mode)
        account.trip_begin_ms = waited_ms = account.elapsed_ms()
        # a byte model generates exactly the requested bytes
        max_bytes = request.max_bytes if request.max_bytes and mode.tokenizer is not BYTE_TOKENIZER else None
        reading = OutputText(mode.tokenizer, generation.prompt, request.stops, max_bytes)
        held, ended, read = b"", False, 0
        pending = list[router_pb2.TokenLogprob]()
        async with aclosing(retry_after_audit(mode, generation, account, request.whole)) as pieces:
            async for tokens in pieces:
                if tokens is None:
                    reading = OutputText(mode.tokenizer, generation.prompt, request.stops, max_bytes)
                    held, read, account.output_bytes, account.reported = b"", 0, 0, 0
                    pending.clear()
                    continue
                if account.prompt_logprobs:
                    scored = [_logprob_of(drawn, mode.tokenizer) for drawn in account.prompt_logprobs]
                    yield router_pb2.GenerateResponse(prompt_logprobs=scored)
                    account.prompt_logprobs.clear()
                text = b""
                # one by one if tokens are reported: the number at the end must not depend on the pieces
                for each in account.vocabulary.split(tokens) if generation.logprobs is not None else (tokens,):
                    text, read = text + reading.feed(each), read + 1
                    if reading.over:
                        break
                if generation.logprobs is not None:
                    pending += [_logprob_of(drawn, mode.tokenizer) for drawn in account.take_logprobs(read)]
                account.output_bytes += len(text)
                while account.trips:
                    yield router_pb2.GenerateResponse(trip=account.trips.pop(0))
                if request.whole:
                    held += text
                elif text:
                    yield router_pb2.GenerateResponse(text=text, logprobs=pending)
                    pending.clear()
                ended = not generation.ends.isdisjoint(account.vocabulary.tokens(tokens)) if generation.ends else False
                if reading.over:
                    break
        if not all([await audit for audit in account.audits]):
            raise data_loss(WRONG_SO_FAR)
        rest = reading.end()
        account.output_bytes += len(rest)
        if (text := held + rest) or pending:
            yield router_pb2.GenerateResponse(text=text, logprobs=pending)
        account.stopped = reading.stopped or ((ended or account.complete) and not reading.over)
        served.conditions.record(mode.name, account, account.elapsed_ms() - waited_ms)
        summary = record.summary = account.summary(mode.name, request.seed)
        summary.request = record.name
        yield router_pb2.GenerateResponse(summary=summary)


def _tokenized(tokenizer: Tokenizer, request: router_pb2.TokenizeRequest) -> router_pb2.TokenizeResponse:
    if request.tokens:
        reading = tokenizer.detokenizer(b"")
        text = reading.feed(encoded(tokenizer, request.tokens, "tokens")) + reading.end()
        return router_pb2.TokenizeResponse(text=text)
    check_text("text", request.text)
    tokens = tokenizer.encode_piece(request.text.decode()) if request.piece else tokenizer.encode_text(request.text)
    return router_pb2.TokenizeResponse(tokens=tokenizer.vocabulary.tokens(tokens))


def _logprob_of(drawn: Drawn, tokenizer: Tokenizer) -> router_pb2.TokenLogprob:
    top = [router_pb2.TokenLogprob(text=tokenizer.token_text(token), logprob=nats) for token, nats in drawn.top]
    return router_pb2.TokenLogprob(text=tokenizer.token_text(drawn.token), logprob=drawn.nats, top=top)
