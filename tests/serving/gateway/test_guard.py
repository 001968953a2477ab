"""Requests of other sites, and the security headers of every answer."""

import httpx
import pytest
from starlette.datastructures import Headers

from serving.gateway.errors import ApiError
from serving.gateway.middleware import check_site

ASKED = {"model": "onesweep-local", "prompt": "a", "max_tokens": 2}


@pytest.mark.parametrize(
    "host", ["127.0.0.1:7780", "localhost:7780", "LOCALHOST", "[::1]:7780", "10.8.0.1", "one.example."]
)
def test_a_host_header_with_an_allowed_name_is_accepted_and_none_too(host: str) -> None:
    check_site({"one.example"}, "GET", Headers({"host": host}))
    check_site({"one.example"}, "GET", Headers())  # HTTP/1.0, as a balancer's probe


STRANGERS = ("evil.example", "127.0.0.1.evil.example", "", "localhost:port", "a b", "[evil]", "@localhost")
SITES = ("http://evil.example", "null", "http://localhost:1", "", "http://localhost:7780.evil.example")
FORMS = ("", "text/plain", "application/x-www-form-urlencoded", "text/plain;application/json")  # any site can send them


@pytest.mark.parametrize(
    ("method", "headers", "says"),
    [
        *(("GET", {"host": host}, "--allow-host") for host in STRANGERS),
        *(("GET", {"host": "localhost:7780", "origin": origin}, "another site") for origin in SITES),
        ("GET", {"origin": "null"}, "another site"),
        *(("POST", {"host": "localhost", "content-type": kind}, "Content-Type") for kind in FORMS),
    ],
)
def test_requests_of_other_sites_are_refused(method: str, headers: dict[str, str], says: str) -> None:
    with pytest.raises(ApiError, match=says):
        check_site({"one.example"}, method, Headers(headers))


def test_the_server_refuses_requests_of_other_sites(http: httpx.Client) -> None:
    own = str(http.base_url).rstrip("/")
    assert http.post("/v1/completions", json=ASKED, headers={"origin": own}).status_code == 200
    for headers in ({"origin": "http://evil.example"}, {"host": "evil.example"}):
        answer = http.post("/v1/completions", json=ASKED, headers=headers)
        assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")
        assert "access-control-allow-origin" not in answer.headers
    preflight = http.options("/v1/completions", headers={"origin": own, "access-control-request-method": "POST"})
    assert "access-control-allow-origin" not in preflight.headers


@pytest.mark.parametrize("path", ["/", "/hosts", "/static/race.js", "/api/hosts", "/v1/models", "/nothing"])
def test_every_answer_has_security_headers(http: httpx.Client, path: str) -> None:
    headers = http.get(path).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'")
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "server" not in headers
