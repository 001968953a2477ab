"""A worker's calls: retried while the coordinator is away, else ended by an error with a sentence."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import grpc

from stages.errors import Interrupted, RequestError, ServiceError
from stages.wire.channel import open_blocking_channel
from stages.wire.status import STATUS_MARK, retry_after_ms, trailing_metadata
from stages.wire.tls import LOOPBACK_ONLY, Security, handshake_problem
from stages.wire.tokens import token_metadata
from trainer.rounds.transfer import FILE_GONE, PIECE_BYTES, DamagedError, IncomingFile, checked, piece_of
from trainer.v1 import rounds_pb2, rounds_pb2_grpc

log = logging.getLogger(__name__)

T = TypeVar("T")
A = TypeVar("A")
Needed = Callable[[], bool]
Codes = tuple[grpc.StatusCode, ...]

CALL_S = 30.0
TRANSFER_S = 24 * 3600.0
LONG_POLL_S = 20.0
POLL_S = 0.05
# While gRPC pauses before it reconnects, calls fail without sending a packet, so quick retries cause no storm.
FIRST_DELAY_S, LAST_DELAY_S = 0.2, 2.0
LOG_EVERY_S = 30.0
BEATS_PER_LEASE = 3
BEAT_S = 2.0  # longest time between two heartbeats, and so the greatest age of the state in `onesweep train status`

# Codes worth a retry: the coordinator or the link to it may be back.
RETRIABLE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)


class LeaseLostError(ServiceError):
    """The place went to another worker, or the coordinator no longer knows it."""


class TakenOverError(LeaseLostError):
    """Another process has joined under the worker's name."""


LEASE_ERRORS = {grpc.StatusCode.ABORTED: LeaseLostError, grpc.StatusCode.ALREADY_EXISTS: TakenOverError}


class FileGoneError(ServiceError):
    """The file has been replaced by a newer version."""


class RoundsClient:
    """The calls of one worker. Several threads may use it at once."""

    def __init__(
        self,
        address: str,
        security: Security = LOOPBACK_ONLY,
        token: str = "",
        patience_s: float = 600.0,
        asked_to_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """:param patience_s: how long to try to reach a coordinator; :param asked_to_stop: polled while waiting.

        Raises InputError for an address that may not be dialled.
        """
        self.address, self.security, self.patience_s, self.asked_to_stop = address, security, patience_s, asked_to_stop
        self.sent_bytes = self.received_bytes = 0
        self._has_answered = False
        self._metadata = token_metadata(token)
        self._stamp = security.stamp()
        self._open()

    def close(self) -> None:
        self._channel.close()

    def join(self, request: rounds_pb2.JoinRequest, wait: bool = False) -> rounds_pb2.JoinResponse:
        """Join the run; :param wait: wait for a place if all are taken. Raises ServiceError."""
        final = () if wait or request.stands_by else (grpc.StatusCode.RESOURCE_EXHAUSTED,)
        return self._answer("Join", request, CALL_S, final)

    def next(self, request: rounds_pb2.NextRequest) -> rounds_pb2.NextResponse:
        """The next order. Raises ServiceError, LeaseLostError, Interrupted."""
        request.wait_seconds = LONG_POLL_S
        return self._answer("Next", request, LONG_POLL_S + CALL_S)

    def _answer(self, method: str, request: object, timeout_s: float, final: Codes = ()) -> Any:  # noqa: ANN401
        def attempt() -> Any:  # noqa: ANN401
            ask = getattr(self._stub, method)
            with self._stoppable(ask.future(request, timeout=timeout_s, metadata=self._metadata)) as call:
                return call.result()

        return self._retrying(attempt, final)

    def beat(self, request: rounds_pb2.BeatRequest) -> rounds_pb2.BeatResponse:
        """Try once. Raises grpc.RpcError."""
        request.sent_bytes, request.received_bytes = self.sent_bytes, self.received_bytes
        return self._stub.Beat(request, timeout=CALL_S, metadata=self._metadata)

    def leave(self, request: rounds_pb2.LeaveRequest) -> None:
        """Try once, without an error if it fails: the lease expires by itself."""
        try:
            self._stub.Leave(request, timeout=2.0, metadata=self._metadata)
        except grpc.RpcError as error:
            log.warning("could not give the place back (%s); it is free once the lease expires", _status_of(error)[0])

    def fetch(self, file: rounds_pb2.File, worker: str, lease: str, path: Path) -> bytes:
        """Fetch a file from the coordinator, kept at `path` while it arrives.

        Raises FileGoneError, ServiceError, LeaseLostError, Interrupted, CheckpointError.
        """
        intake = IncomingFile(path, checked(file))
        found = self._fetched(intake, rounds_pb2.FetchRequest(worker=worker, lease=lease, name=file.name), intake.read)
        intake.drop()
        return found

    def fetch_features(self, request: rounds_pb2.FetchRequest, size: int, path: Path, needed: Needed) -> None:
        """Fetch a round's features to `path` as they are made, until all are there. Raises as `fetch` does.

        :param needed: whether they are still needed; if not, raises Interrupted.
        """
        self._fetched(IncomingFile(path, rounds_pb2.File(size=size)), request, lambda: None, needed)

    def _fetched(
        self,
        intake: IncomingFile,
        request: rounds_pb2.FetchRequest,
        finish: Callable[[], T],
        needed: Needed = lambda: True,
    ) -> T:
        def attempt() -> T:
            request.offset = intake.offset
            if not intake.whole:
                call = self._stub.Fetch(request, timeout=TRANSFER_S, metadata=self._metadata)
                with self._stoppable(call, needed):
                    for piece in call:
                        intake.write(piece)
                        self.received_bytes += len(piece.data)
            return finish()

        return self._retrying(attempt, needed=needed)

    def pass_features(
        self, passing: rounds_pb2.Passing, size: int, read: Callable[[int], bytes], needed: Needed
    ) -> None:
        """Send a round's features as they are made, until the coordinator has stored all `size` bytes.

        :param read: waits for bytes from an offset on; returns none once they are no longer `needed`, which raises
        Interrupted. Raises FileGoneError, ServiceError, LeaseLostError, Interrupted.
        """

        def judge(number: int, response: rounds_pb2.PassResponse) -> bool | None:
            return (number > 0 and response.offset == size) or None  # the first response says where to begin

        self._sent("Pass", rounds_pb2.PassRequest, {"passing": passing}, size, read, judge, needed)

    def submit(self, submission: rounds_pb2.Submission, payload: bytes) -> rounds_pb2.Verdict:
        """Send an update until there is a verdict. Raises ServiceError, LeaseLostError, Interrupted."""

        def judge(number: int, response: rounds_pb2.SubmitResponse) -> rounds_pb2.Verdict | None:
            return response.verdict if response.WhichOneof("step") == "verdict" else None

        def read(offset: int) -> bytes:
            return payload[offset : offset + PIECE_BYTES]

        header = {"submission": submission}
        return self._sent("Submit", rounds_pb2.SubmitRequest, header, len(payload), read, judge)

    def _sent(
        self,
        method: str,
        kind: Callable[..., T],
        header: dict[str, Any],
        size: int,
        read: Callable[[int], bytes],
        judge: Callable[[int, Any], A | None],
        needed: Needed = lambda: True,
    ) -> A:
        """Send a header, and pieces from the requested offset; :param judge: turns a response into the result."""

        def requests(offsets: SimpleQueue[int | None]) -> Iterator[T]:
            yield kind(**header)
            offset = offsets.get()
            while offset is not None and offset < size and (data := read(offset)):
                self.sent_bytes += len(data)
                yield kind(piece=piece_of(data, offset))
                offset += len(data)

        def attempt() -> A:
            offsets: SimpleQueue[int | None] = SimpleQueue()
            try:
                responses = getattr(self._stub, method)(requests(offsets), timeout=TRANSFER_S, metadata=self._metadata)
                with self._stoppable(responses, needed):
                    for number, response in enumerate(responses):
                        if (answer := judge(number, response)) is not None:
                            return answer
                        offsets.put(response.offset)
            finally:
                offsets.put(None)
            raise DamagedError("the coordinator ended the call before the transfer was complete")

        return self._retrying(attempt, needed=needed)

    def watch(self, interval_s: float) -> Iterator[rounds_pb2.WatchUpdate]:
        """Yield updates until the run has ended. Raises ServiceError.

        If the coordinator goes away, keeps trying to reach it while patience lasts.
        """
        request, updates = rounds_pb2.WatchRequest(interval_seconds=interval_s), None

        def attempt() -> rounds_pb2.WatchUpdate:
            nonlocal updates
            stream, updates = updates or self._stub.Watch(request, metadata=self._metadata), None
            if (update := next(stream, None)) is None:
                raise DamagedError(f"the coordinator at {self.address} has stopped")
            updates = stream
            return update

        update = rounds_pb2.WatchUpdate()
        while update.state != rounds_pb2.RUN_STATE_FINISHED:
            update = self._retrying(attempt, () if self._has_answered else RETRIABLE)
            yield update

    @contextmanager
    def _stoppable(self, call: Any, needed: Needed = lambda: True) -> Iterator[Any]:  # noqa: ANN401 - a call of any type
        """Iterate over a call, and cancel it on a request to stop: a frozen coordinator would never answer."""
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(POLL_S):
                if self.asked_to_stop() or not needed():
                    call.cancel()
                    return

        looking = threading.Thread(target=look, name="stop", daemon=True)
        looking.start()
        try:
            yield call
        except grpc.FutureCancelledError:
            self._stop_if_asked()
            raise
        finally:
            ended.set()
            call.cancel()
            looking.join()

    def _retrying(self, attempt: Callable[[], T], final: Codes = (), needed: Needed = lambda: True) -> T:
        """Try until it succeeds. If bytes moved in between, the patience starts over."""
        begin, logged_s, delay, moved = time.monotonic(), -LOG_EVERY_S, FIRST_DELAY_S, self._bytes_moved()
        while True:
            self._stop_if_asked(needed)
            try:
                answer = attempt()
                self._has_answered = True
                return answer
            except (RequestError, grpc.RpcError) as error:
                self._stop_if_asked(needed)
                problem = self._problem(error, final)
                retry_ms = retry_after_ms(trailing_metadata(error)) if isinstance(error, grpc.RpcError) else None
                wait_s = min(retry_ms / 1000, LAST_DELAY_S) if retry_ms else delay
            now = time.monotonic()
            if self._bytes_moved() != moved:
                begin, moved, delay = now, self._bytes_moved(), FIRST_DELAY_S
            if now - begin > self.patience_s:
                raise ServiceError(f"{problem}; gave up after {self.patience_s:.0f} s")
            if now - logged_s > LOG_EVERY_S:
                log.warning("%s; retrying", problem)
                logged_s = now
            while time.monotonic() < now + wait_s:
                self._stop_if_asked()
                time.sleep(min(POLL_S, wait_s))
            delay = min(2 * delay, LAST_DELAY_S)
            self._renew()

    def _problem(self, error: Exception, final: Codes) -> str:
        """A sentence about a temporary problem. Raises for a lasting one."""
        if not isinstance(error, grpc.RpcError):
            return str(error)
        code, details = _status_of(error)
        if code in LEASE_ERRORS:
            raise LEASE_ERRORS[code](details)
        if trailing_metadata(error).get(STATUS_MARK) == FILE_GONE:
            raise FileGoneError(details)
        if code in final or code not in RETRIABLE:
            raise ServiceError(self._sentence(code, details, "refuses"))
        return self._sentence(code, details, "says")

    def _sentence(self, code: grpc.StatusCode, details: str, verb: str) -> str:
        """Raises ServiceError if the first handshake fails: later ones also fail while a coordinator is killed."""
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return f"the server at {self.address} is not a coordinator; start one with `onesweep train coordinate`"
        if code is not grpc.StatusCode.UNAVAILABLE:
            return f"{self.address} {verb}: {details or code.name}"
        if not (problem := handshake_problem(details, self.security)):
            return f"no coordinator answers at {self.address}: check the address, and that it runs"
        if not self._has_answered:
            raise ServiceError(f"the coordinator at {self.address} {problem}")
        return f"the coordinator at {self.address} {problem}"

    def _bytes_moved(self) -> int:
        return self.sent_bytes + self.received_bytes

    def _stop_if_asked(self, needed: Needed = lambda: True) -> None:
        if self.asked_to_stop() or not needed():
            raise Interrupted("stopped on request; run again to resume")

    def _renew(self) -> None:
        """Open a channel with the current certificates."""
        if self.security.stamp() != self._stamp:
            self._stamp = self.security.stamp()
            self._channel.close()
            self._open()

    def _open(self) -> None:
        self._channel = open_blocking_channel(self.address, security=self.security)
        self._stub: Any = rounds_pb2_grpc.RoundsServiceStub(self._channel)


def _status_of(error: Any) -> tuple[grpc.StatusCode, str]:  # noqa: ANN401 - that an RpcError has these the stubs do not say
    return error.code() or grpc.StatusCode.UNKNOWN, error.details() or ""


class Heartbeat:
    """Sends heartbeats on its own thread until stopped, and keeps the coordinator's newest answer."""

    def __init__(self, client: RoundsClient, lease_s: float, report: Callable[[], rounds_pb2.BeatRequest]) -> None:
        """:param report: makes the message, on the heartbeat's thread."""
        self.open_round = -1  # of the part; -1 before the first answer
        self.ended = False
        self.lost: LeaseLostError | None = None
        self._client, self._every_s, self._report = client, min(lease_s / BEATS_PER_LEASE, BEAT_S), report
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(2.0)

    def _beat(self) -> None:
        while not self._stopped.wait(self._every_s):
            try:
                answer = self._client.beat(self._report())
            except grpc.RpcError as error:
                code, details = _status_of(error)
                if code in LEASE_ERRORS:
                    self.lost = LEASE_ERRORS[code](details)
            except ValueError:  # the channel is being renewed
                continue
            else:
                self.open_round, self.ended = answer.open_round, answer.ended
