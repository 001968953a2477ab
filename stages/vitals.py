"""Liveness and readiness in plain text on a port of their own: for probes, which have no certificate."""

from __future__ import annotations

import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc

from stages.security import Security
from stages.transport import bind, new_server


async def serve_vitals(checks: health.aio.HealthServicer, address: str | None) -> grpc.aio.Server:
    """A server that answers from `checks` and knows nothing else; without an address it does nothing.

    Raises InputError or ServiceError when it cannot listen there."""
    server = new_server()
    if address is not None:
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        bind(server, address, Security(insecure=True))  # whether a process is ready is all that can be learnt here
        await server.start()
    return server
