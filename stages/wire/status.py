"""gRPC statuses: the error that a server ends a call with, and messages that cannot be parsed.

By itself gRPC answers a request that it cannot parse with UNKNOWN and a traceback in the log, before any check of ours,
and returns None to a caller whose answer it cannot parse. `DecodeErrors` and `with_decode_errors` give both a status.
"""

from __future__ import annotations

import asyncio
import re
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping, MutableSequence
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from stages.errors import WordedError, printable

RETRY_AFTER = "retry-after-ms"
# Trailing metadata of every StatusError, its reason: tells ours from statuses that gRPC makes up when a peer is gone.
STATUS_MARK = "onesweep-refusal"
TOO_LONG = "context_length_exceeded"  # a reason, as OpenAI's API words it: its clients then shorten the conversation
REQUEST_KEY = "onesweep-request"  # metadata of a router's answer: the name of the request in logs
# Protocol of router.proto, which callers state. Third-party callers need not: 0 means protocol 1.
CALLS = 1
# a message may quote a field, which may be as long as a gRPC message
MAX_CHARACTERS = 1000
DEFAULT_RETRY_MS = 1000
CALL_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")

Code = grpc.StatusCode  # for logic modules, which use no other part of gRPC
_BY_NUMBER = {code.value[0]: code for code in Code}
M = TypeVar("M", bound=Message)
Context = grpc.aio.ServicerContext[Any, Any]
Metadata = tuple[tuple[str, str], ...]
if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]


class StatusError(WordedError):
    """A status code, a sentence for people, for RESOURCE_EXHAUSTED the time to wait before a retry, and for programs
    that must tell this error from others of its code a reason, never empty: gRPC's protocol has no empty metadata."""

    def __init__(self, code: Code, message: str, retry_after_ms: int | None = None, reason: str = "other") -> None:
        if len(message) > MAX_CHARACTERS:
            message = f"{message[:MAX_CHARACTERS]} ..."
        message = printable(message, newline=" ")  # another machine may have written part of it
        super().__init__(message)
        self.code, self.message, self.retry_after_ms, self.reason = code, message, retry_after_ms, reason

    @property
    def number(self) -> int:
        return int(self.code.value[0])

    @classmethod
    def numbered(cls, number: int, message: str, retry_after_ms: int | None = None) -> StatusError:
        """The status for a code from the wire; RESOURCE_EXHAUSTED always has a retry time, by default a second."""
        code = _BY_NUMBER.get(number, grpc.StatusCode.UNKNOWN)
        if code is grpc.StatusCode.OK:  # not an error, and no call can be aborted with it
            code = grpc.StatusCode.UNKNOWN
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            retry_after_ms = retry_after_ms or DEFAULT_RETRY_MS
        return cls(code, message, retry_after_ms)

    async def abort(self, context: Context) -> None:
        """End a call with this status; trailing metadata already set stays. The handler should then return."""
        metadata: list[Any] = [*(context.trailing_metadata() or ()), (STATUS_MARK, self.reason)]
        if self.retry_after_ms is not None:
            metadata.append((RETRY_AFTER, str(self.retry_after_ms)))
        try:
            with ignoring_ended_call():
                await context.abort(self.code, self.message, tuple(metadata))
        except grpc.aio.AbortError as error:
            # gRPC keeps the exception for the end of the call, in an object that Python's collector cannot see into.
            # With the frames that it passed, every refused call would stay for good, and its request with it.
            error.__traceback__ = error.__context__ = None


# Constructors of the errors that our servers end calls with.
aborted = partial(StatusError, grpc.StatusCode.ABORTED)
already_exists = partial(StatusError, grpc.StatusCode.ALREADY_EXISTS)
data_loss = partial(StatusError, grpc.StatusCode.DATA_LOSS)
deadline_exceeded = partial(StatusError, grpc.StatusCode.DEADLINE_EXCEEDED)
exhausted = partial(StatusError, grpc.StatusCode.RESOURCE_EXHAUSTED)
failed_precondition = partial(StatusError, grpc.StatusCode.FAILED_PRECONDITION)
internal = partial(StatusError, grpc.StatusCode.INTERNAL)
invalid = partial(StatusError, grpc.StatusCode.INVALID_ARGUMENT)
not_found = partial(StatusError, grpc.StatusCode.NOT_FOUND)
too_long = partial(invalid, reason=TOO_LONG)
permission_denied = partial(StatusError, grpc.StatusCode.PERMISSION_DENIED)
unauthenticated = partial(StatusError, grpc.StatusCode.UNAUTHENTICATED)
unavailable = partial(StatusError, grpc.StatusCode.UNAVAILABLE)


@contextmanager
def ignoring_ended_call() -> Iterator[None]:
    """Guard for sending to a call whose deadline may pass at this moment, which is not a failure.

    Raises CancelledError, as gRPC itself does if it notices in time.
    """
    try:
        yield
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


def call_metadata(error: grpc.RpcError) -> dict[str, str]:
    """All metadata of a failed call; one that this side cancelled has no trailing metadata."""
    call: Any = error
    return {str(key): str(value) for key, value in call.initial_metadata() or ()} | trailing_metadata(error)


def retry_after_ms(metadata: Mapping[str, str]) -> int | None:
    """The retry time that a server named, in milliseconds; None if it is not a number."""
    delay_ms = metadata.get(RETRY_AFTER, "")
    return int(delay_ms) if re.fullmatch("[0-9]{1,9}", delay_ms) else None


def trailing_metadata(error: grpc.RpcError) -> dict[str, str]:
    metadata: Any = error.trailing_metadata()
    return {str(key): str(value) for key, value in metadata or ()}


def made_printable(message: M) -> M:
    """Make all strings of another machine's message printable in place, as they go to logs and terminals."""
    each: Any
    for field, value in message.ListFields():
        if isinstance(value, str):
            setattr(message, field.name, printable(value, newline=" "))
        elif isinstance(value, Message):
            made_printable(value)
        elif not isinstance(value, int | float | bytes) and isinstance(value, MutableSequence):  # most are numbers
            for at, each in enumerate(value):
                if isinstance(each, str):
                    value[at] = printable(each, newline=" ")
                elif isinstance(each, Message):
                    made_printable(each)
    return message


def record_of(message: Message) -> dict[str, Any]:
    """A message as JSON values, under its own names. Protobuf's JSON would write 64-bit numbers as strings."""
    record: dict[str, Any] = {}
    for described in message.DESCRIPTOR.fields:
        value, kind = getattr(message, described.name), described.message_type
        if kind is not None and kind.GetOptions().map_entry:
            record[described.name] = dict(value)
        elif described.is_repeated:
            record[described.name] = [record_of(each) if kind else each for each in value]
        elif described.enum_type is not None:
            record[described.name] = described.enum_type.values_by_number[value].name
        elif not described.has_presence or message.HasField(described.name):
            record[described.name] = record_of(value) if kind else value
    return record


def protocol_refusal(theirs: int, sender: str, receiver: str, ours: int, subject: str) -> StatusError:
    """The refusal if two processes speak different protocols: it names the one to upgrade."""
    older = sender if theirs < ours else receiver
    return failed_precondition(
        f"{sender} speaks protocol {theirs or 1} of {subject}, {receiver} protocol {ours}: upgrade onesweep on {older}"
    )


def check_protocol(protocol: int, receiver: str) -> None:
    """Raise StatusError if the caller of a router or a training speaks another protocol."""
    if (protocol or 1) != CALLS:
        raise protocol_refusal(protocol, "the caller", receiver, CALLS, "calls")


# A deserializer that never fails replaces gRPC's parsing, and a check follows it: gRPC offers no hook in between.
UNDECODABLE = object()  # marks a message that cannot be parsed
# A field takes two bytes to send, and 90 once parsed: 64 MB of fields would take 3 GB and seconds. Messages below
# SCANNED_BYTES are parsed without a scan.
MAX_PARTS, SCANNED_BYTES = 1 << 17, 64 << 10
# A sound host answers these calls in at most this many bytes. The caller would scan more on its event loop, and keep
# what it finds there.
ANSWER_BYTES = {
    f"/stages.v1.StageService/{method}": max_bytes
    for method, max_bytes in (("Describe", 96 << 10), ("Release", 48 << 10), ("Push", 48 << 10), ("Probe", 48 << 10))
}


class NoMessageError(grpc.aio.AioRpcError):
    """A call's answer that cannot be parsed, which no sound program sends."""


class Interceptor(grpc.aio.ServerInterceptor):
    """An interceptor of the calls that a server has a handler for."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        return None if handler is None else self.answered_by(handler, handler_call_details)

    @abstractmethod
    def answered_by(self, handler: Any, call: grpc.HandlerCallDetails) -> Any:  # noqa: ANN401
        """The handler that replaces a call's own."""


class DecodeErrors(Interceptor):
    """Answers requests that cannot be parsed with INVALID_ARGUMENT, and ends a call with the StatusError that its
    handler raises. It stands before all other interceptors."""

    def answered_by(self, handler: Any, call: grpc.HandlerCallDetails) -> Any:  # noqa: ANN401
        kind, inner = kind_of(handler)

        async def answer(request: object, context: Context) -> object:
            try:
                return await inner(request if request is not UNDECODABLE else _undecodable(), context)
            except StatusError as refusal:
                await refusal.abort(context)
            return None

        async def stream(request: object, context: Context) -> AsyncIterator[object]:
            try:
                responses = inner(request if request is not UNDECODABLE else _undecodable(), context)
                if not hasattr(responses, "__aiter__"):  # the handler writes its answers itself
                    await responses
                    return
                async with aclosing(responses):
                    async for response in responses:
                        yield response
            except StatusError as refusal:
                await refusal.abort(context)

        guarded = handler._replace(**{kind: stream if handler.response_streaming else answer})
        if (parse := handler.request_deserializer) is not None:
            # a handler reads a stream itself, so it gets the error; a single request is parsed before any code runs
            otherwise = _undecodable if handler.request_streaming else lambda: UNDECODABLE
            guarded = guarded._replace(request_deserializer=_parser(parse, otherwise))
        return guarded


def kind_of(handler: Any) -> tuple[str, Any]:  # noqa: ANN401
    """The kind of the calls that a handler answers, and its function."""
    return next((kind, inner) for kind in CALL_KINDS if (inner := getattr(handler, kind)) is not None)


def checked_handler(handler: Any, check: Callable[[Any, Context], object]) -> Any:  # noqa: ANN401
    """The same handler, with a check; to be used behind DecodeErrors.

    :param check: called first, with the request: a message or an iterator of messages. A StatusError ends the call.
    """
    kind, inner = kind_of(handler)

    def answer(request: object, context: Context) -> Any:  # noqa: ANN401
        check(request, context)
        return inner(request, context)

    return handler._replace(**{kind: answer})


def with_decode_errors(channel: grpc.aio.Channel, metadata: Metadata = ()) -> grpc.aio.Channel:
    """The same channel, whose calls fail with INTERNAL if an answer cannot be parsed. :param metadata: for calls that
    bring none of their own."""
    wrapped: Any = _Channel(channel, metadata)
    return wrapped


class _Channel(AbstractAsyncContextManager["_Channel"]):
    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata) -> None:
        self._channel, self._metadata = channel, metadata

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        attribute = getattr(self._channel, name)
        return partial(_calls, attribute, self._metadata) if name in CALL_KINDS else attribute

    async def __aexit__(self, *exc: object) -> None:
        await self._channel.close()


class _Call:
    def __init__(self, call: Any) -> None:  # noqa: ANN401
        self._call = call

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._call, name)

    def __await__(self) -> Generator[Any, None, Any]:
        answer = yield from self._call.__await__()
        if answer is UNDECODABLE:
            raise _no_message()
        return answer

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            async for answer in self._call:
                if answer is UNDECODABLE:
                    raise _no_message()
                yield answer
        finally:
            self._call.cancel()


def _calls(make: Callable[..., Any], metadata: Metadata, path: str, **how: Any) -> Callable[..., _Call]:  # noqa: ANN401
    if how.get("response_deserializer") is not None:
        parse, max_bytes = how["response_deserializer"], ANSWER_BYTES.get(path, 0)
        how["response_deserializer"] = _parser(parse, lambda: UNDECODABLE, max_bytes)
    begin = make(path, **how)
    return lambda *request, **options: _Call(begin(*request, **({"metadata": metadata} | options)))


def _no_message() -> NoMessageError:
    nothing = grpc.aio.Metadata()
    words = "the answer is not a message of this call's type, or is too large"
    return NoMessageError(grpc.StatusCode.INTERNAL, nothing, nothing, words)


def _parser(
    parse: Callable[[bytes], object], otherwise: Callable[[], object], max_bytes: int = 0
) -> Callable[[bytes], object]:
    """`parse`, or `otherwise` for bytes that are not a message.

    :param max_bytes: of a message; 0 = gRPC's limit.
    """

    def parsed(data: bytes) -> object:
        if max_bytes and len(data) > max_bytes:
            return otherwise()
        try:
            return parse(data) if len(data) < SCANNED_BYTES or _few_parts(data, parse) else otherwise()
        except DecodeError:
            return otherwise()

    return parsed


def _few_parts(data: bytes, parse: Any) -> bool:  # noqa: ANN401 - a method of the message's type
    """False for a message of more than MAX_PARTS fields, including those of nested messages."""
    inside, at = [(len(data), parse.__self__.DESCRIPTOR)], 0
    with suppress(IndexError):  # at the end of the message, even a truncated one: parsing reports that
        for _ in range(MAX_PARTS):
            while at >= inside[-1][0]:
                inside.pop()
            tag, at = _varint(data, at)
            size, at = _varint(data, at) if tag & 5 == 0 else ({1: 8, 5: 4}.get(tag & 7, 0), at)
            field = inside[-1][1].fields_by_number.get(tag >> 3) if tag & 7 == 2 else None
            if field is not None and field.message_type is not None:
                inside.append((at + size, field.message_type))
            elif tag & 7:
                at += size
        return False
    return True


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A varint, and the offset where it ends. Raises IndexError."""
    value = shift = 0
    while data[at] & 128 and shift < 70:
        value, shift, at = value | (data[at] & 127) << shift, shift + 7, at + 1
    return value | data[at] << shift, at + 1


def _undecodable() -> NoReturn:
    raise invalid("the request is not a message of this call's type: it is damaged, incomplete or from another program")
