"""The pages: files of this package, held in memory."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from fastapi import APIRouter, Response

from serving.http.errors import ApiError

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


@dataclass(frozen=True)
class _File:
    content: bytes
    media_type: str


def _read() -> dict[str, _File]:
    folder = files("serving.http").joinpath("static")
    return {f.name: _File(f.read_bytes(), _TYPES[f.name.rpartition(".")[2]]) for f in folder.iterdir() if f.is_file()}


def page_routes() -> APIRouter:
    """Routes to every file of `static/`; nothing is looked up on disk while serving."""
    held, routes = _read(), APIRouter(include_in_schema=False)

    @routes.get("/static/{name}", response_class=Response)
    async def asset(name: str) -> Response:
        if name not in held:
            raise ApiError(404, "no such file")
        return _response(held[name])

    @routes.get("/", response_class=Response)
    async def race() -> Response:
        return _response(held["race.html"])

    @routes.get("/hosts", response_class=Response)
    async def hosts() -> Response:
        return _response(held["hosts.html"])

    return routes


def _response(file: _File) -> Response:
    # asked for anew each time: a page must fit the server that it talks to
    return Response(file.content, media_type=file.media_type, headers={"cache-control": "no-cache"})
