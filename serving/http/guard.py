"""Who may call: no other site's page, and nobody by a name that is not ours."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.datastructures import Headers

from serving.http.errors import ApiError
from stages.web.caller import is_other_site, is_ours, page_headers

SECURITY_HEADERS = page_headers()
"""Of every answer."""


@dataclass(frozen=True)
class Guard:
    """Checks the headers of a request."""

    names: frozenset[str] = frozenset()
    """That we know as ours, beside `localhost` and addresses."""

    def check(self, method: str, headers: Headers) -> None:
        """Raises ApiError: 403 for a wrong name or another site, 415 for a body that is not JSON."""
        host = headers.get("host", "")
        if not is_ours(host, self.names):
            raise ApiError(
                403,
                "this server is not known by the name in the Host header: use its address or localhost, "
                "or start it with --allow-host NAME",
                code="unknown_host",
            )
        if is_other_site(headers.get("origin"), host):
            raise ApiError(403, "a page of another site may not call this server", code="cross_origin")
        # a form or a plain-text request needs no permission from us to be sent by another site's page
        if method == "POST" and headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "the body must be JSON: send it with Content-Type: application/json")
