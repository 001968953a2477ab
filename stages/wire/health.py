"""gRPC's health service: the library's own writes with its lock held, so that one client that reads nothing would
hold up every change of status, and the end of the process."""

import asyncio

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stages.wire.channel import CallBounds, bind, new_server
from stages.wire.tls import Security

Status = health_pb2.HealthCheckResponse
Context = grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]

MOST_WATCHERS = 64
WRITE_S = 10.0  # a client that has not read the last status by then is let go


class HealthChecks(health_pb2_grpc.HealthServicer):
    """The status of each service by its name; the empty name stands for the process. Lives on the event loop."""

    def __init__(self) -> None:
        self._status = {"": Status.SERVING}
        self._watchers = set[asyncio.Event]()
        self._is_stopping = False

    def set(self, service: str, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        """Change a status, unless the process is stopping."""
        if not self._is_stopping:
            self._status[service] = status
            self._tell()

    def stop(self) -> None:
        """Say NOT_SERVING of everything from now on."""
        self._is_stopping = True
        self._status = dict.fromkeys(self._status, Status.NOT_SERVING)
        self._tell()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        if (status := self._status.get(request.service)) is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service[:80]!r} here")
        return Status(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        if len(self._watchers) >= MOST_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MOST_WATCHERS} clients watch already: use Check")
        changed, last = asyncio.Event(), None
        self._watchers.add(changed)
        try:
            while True:
                status = self._status.get(request.service, Status.SERVICE_UNKNOWN)
                if status != last:
                    async with asyncio.timeout(WRITE_S):
                        await context.write(Status(status=status))
                    last = status
                await changed.wait()
                changed.clear()
        except TimeoutError:
            await context.abort(grpc.StatusCode.CANCELLED, f"the last status was not read within {WRITE_S:g} s")
        finally:
            self._watchers.discard(changed)

    def _tell(self) -> None:
        for changed in self._watchers:
            changed.set()


async def serve_health(checks: HealthChecks, address: str | None) -> grpc.aio.Server:
    """Answer health checks in plain text on a port of their own; without an address do nothing.

    Raises InputError or ServiceError when it cannot listen there.
    """
    server = new_server(interceptors=[CallBounds()])
    if address is not None:
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        # a port of its own: Kubernetes' gRPC probes know no TLS, and readiness is no secret
        bind(server, address, Security(insecure=True))
        await server.start()
    return server
