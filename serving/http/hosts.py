"""/api/hosts: the router's hosts and links as the pages show them, and whether this server can serve."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from google.protobuf.json_format import MessageToDict

from serving.client import RequestRefused, RouterError
from serving.http.access import Authorization, RouterClient
from serving.http.errors import json_response
from serving.lineup import all_entrants
from serving.v1 import router_pb2

READY_TIMEOUT_S = 2.0

routes = APIRouter()


@routes.get("/api/hosts", response_class=Response, tags=["pages"])
async def hosts(client: RouterClient, authorization: Authorization) -> Response:
    """The router's Status, with the entrants that a race may have."""
    return json_response(_shown(await client.status(authorization=authorization)))


@routes.get("/healthz", response_class=Response, tags=["health"])
async def healthz() -> Response:
    """This process lives."""
    return json_response({"status": "live"})


@routes.get("/readyz", response_class=Response, tags=["health"])
async def readyz(client: RouterClient) -> Response:
    """200 when the router can serve; else 503 with the reason."""
    reasons: list[str] = []
    try:
        if await client.serves(READY_TIMEOUT_S):
            return json_response({"status": "ready"})
        status = await client.status(READY_TIMEOUT_S)
        reasons = [host.reason for host in status.hosts if host.reason]
    except RequestRefused:  # it tells nobody more who has no token
        pass
    except RouterError as error:
        reasons = [str(error)]
    return json_response({"status": "not ready", "reason": "; ".join(reasons) or "the hosts are not ready"}, 503)


def _shown(status: router_pb2.StatusResponse) -> dict[str, Any]:
    shown: dict[str, Any] = MessageToDict(
        status, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    for host in shown["hosts"]:
        # 64-bit numbers are strings in protobuf's JSON
        host |= {name: int(host[name]) for name in ("sessions", "session_bytes", "queued", "queue_limit")}
    scorers = {"chain": status.scorer_digest, "ar": status.ar_digest, None: "none needed"}
    entrants = all_entrants(status.modes, scorer=None, suffix="any")
    shown["entrants"] = [entrant.label for entrant in entrants if scorers[entrant.scorer]]
    return shown
