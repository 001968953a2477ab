"""Exit 0 when a gRPC health service answers SERVING: `python healthy.py HOST:PORT [SERVICE]`, for containers.

Without SERVICE it asks whether the process lives; `stages.v1.StageService` and `serving.v1.RouterService` stand for
readiness. In plain text: give it the port of --health where the server has certificates.
"""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0


def problem(address: str, service: str) -> str:
    """Why it is not healthy; empty when it is."""
    options = [("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(address, options=options) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return f"{address}: {error.code().name}"
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return "" if status == "SERVING" else f"{address}: {status}"


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        sys.exit("usage: healthy.py HOST:PORT [SERVICE]")
    sys.exit(problem(sys.argv[1], "".join(sys.argv[2:])) or 0)
