"""Errors in OpenAI's format: one JSON object, and the HTTP status that clients act on."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import grpc
from fastapi import HTTPException
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, create_model
from starlette.exceptions import HTTPException as FrameworkError
from starlette.responses import Response

from serving.client.failover import RequestRefused, RouterError
from serving.gateway.base_fields import INSTEAD
from serving.router.request import SETTINGS
from stages.errors import InputError, OnesweepError, close_to
from stages.wire.status import TOO_LONG

_SHOWN = 80  # most characters quoted of a wrong value
REQUEST_ID = "x-request-id"
_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
# Every other code is a fault of the router or a host: 502.
_STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}

# Fields of `onesweep` that clients of other servers send at the top level.
_OWN_FIELDS = {f.name for f in SETTINGS if f.metadata.get("http")}
_OWN_FIELDS |= {"mode", "timeout_s", "levels", "solver", "guidance"}
# Words in a router's refusal that name a field, with the field's name in requests; and its other name at some paths.
_PARAMS = {f.name: f.name for f in SETTINGS} | {name: f"onesweep.{name}" for name in _OWN_FIELDS}
_SAME_NAME = "echo", "logit_bias", "prompt", "response_format", "stop", "tokens", "tool_choice", "tools"
_PARAMS |= {name: name for name in _SAME_NAME} | {"messages": "prompt", "class": "prompt"}
_PARAMS |= {"budget": "onesweep.budget_ms", "output": "max_tokens", "pictures": "n"}
_PARAMS_AT = {
    "/v1/chat/completions": {"prompt": "messages"},
    "/v1/responses": {"prompt": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"},
}

# The expected value, by pydantic's name of the error: pydantic's own sentences speak of Python types.
_EXPECTED = {
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be a string",
    "string_pattern_mismatch": "must be 1 to 64 letters, digits, _ and -",
    "list_type": "must be a list",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "must be an object"),
    "union_tag_invalid": "must be of type {expected_tags}",
    "union_tag_not_found": "must have a type",
    "literal_error": "must be {expected}",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "string_too_long": "must have at most {max_length} characters",
    **dict.fromkeys(("string_too_short", "too_short"), "must not be empty"),
    "too_long": "must have at most {max_length} entries",
    "missing": "is missing",
}
# More exact sentences, by field, whether the error is inside it, and pydantic's name.
_EXPECTED_IN = {
    **{(name, False, "list_type"): "must be a string or a list" for name in ("input", "prompt", "stop")},
    ("prompt", True, "string_type"): "must be a string or a list",
    ("logit_bias", True, "string_pattern_mismatch"): "must be the number of a token",
    ("entrants", True, "string_pattern_mismatch"): "must be a mode with its settings, such as resample:ar:chunk=32",
    ("size", False, "string_pattern_mismatch"): "must be auto, or WIDTHxHEIGHT",
}

# Errors in the OpenAPI schema: of any request, and of requests to the router. Without a default the framework would add
# a 422, which this server never sends.
_Error = create_model("Error", message=str, type=str, param=str | None, code=str | None)
_ERROR: dict[str, Any] = {"model": create_model("ErrorAnswer", error=_Error)}
COMMON_ERRORS: dict[int | str, dict[str, Any]] = dict.fromkeys((403, 408, 413, 500, 503, "default"), _ERROR)
ROUTER_ERRORS: dict[int | str, dict[str, Any]] = dict.fromkeys((400, 401, 404, 415, 429, 502, 504), _ERROR)


class ApiError(HTTPException):
    """An error answer: a sentence, and the field that it concerns."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.param, self.code = param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}


def api_error_of(error: Exception, path: str = "", model: object = None) -> ApiError:
    """The answer to an exception: ours, one for a wrong field, or the framework's. path, model: of the request."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return field_error(error.errors(), error.body, model)
    if isinstance(error, FrameworkError):  # no such path, no such method
        # paths with GET also answer HEAD, which the routes do not list
        headers = {name: "GET, HEAD" if value == "GET" else value for name, value in (error.headers or {}).items()}
        nowhere = "there is no such path: those of OpenAI's API begin with /v1; GET /openapi.json lists all"
        otherwise = f"this path takes {' or '.join(headers.values())}"
        words = {404: nowhere, 405: otherwise}.get(error.status_code, error.detail)
        return ApiError(error.status_code, words, headers=headers)
    if isinstance(error, RequestRefused | RouterError):
        status, code = _STATUSES.get(error.code, 502), error.code.name.lower()
        if isinstance(error, RequestRefused) and error.reason == TOO_LONG:
            code = TOO_LONG
        headers = named([error.request] if error.request else [])
        if isinstance(error, RouterError) and error.retry_after_ms is not None:
            headers["retry-after"] = str(math.ceil(error.retry_after_ms / 1000))
            headers["retry-after-ms"] = str(error.retry_after_ms)
        if status == 401:
            headers["www-authenticate"] = "Bearer"
        if status == 504:
            headers["x-should-retry"] = "false"  # else OpenAI's client would have it computed twice more
        param = _refused_field(str(error), path) if status == 400 else None
        return ApiError(status, str(error), param=param, code=code, headers=headers)
    if isinstance(error, InputError):
        return ApiError(400, str(error), param=_refused_field(str(error), path))
    if isinstance(error, OnesweepError):
        return ApiError(502, str(error))
    return ApiError(500, "the gateway failed: its log says why")


def named(requests: Sequence[str]) -> dict[str, str]:
    """The header with a request's name in the router's log; the first one's if there are several."""
    return {REQUEST_ID: requests[0]} if requests else {}


def _refused_field(sentence: str, path: str) -> str | None:
    """The field, as sent, that a router's refusal names, if need be in its advice; the mode comes last, because
    refusals of other fields name it too."""
    for part in (sentence.partition(": ")[0], sentence):
        if named := [word for word in re.findall(r"\w+", part) if word in _PARAMS]:
            sent = _PARAMS[min(named, key=lambda word: word == "mode")]
            return _PARAMS_AT.get(path, {}).get(sent, sent)
    return None


def _path(error: Mapping[str, Any], body: object) -> list[str]:
    """The path of a wrong field in the body, without pydantic's names of union members."""
    path = list[str]()
    for place, part in enumerate(error["loc"], 1):
        if (isinstance(body, dict) and part in body) or (isinstance(body, list) and isinstance(part, int)):
            body = body[part]
        elif body is None or error["type"] != "missing" or place < len(error["loc"]):
            continue
        path.append(str(part))
    return path


def _specificity(found: tuple[list[str], Mapping[str, Any]]) -> tuple[int, list[int], bool]:
    """Depth and list positions of an error in a value, and whether it is more than a wrong type."""
    path, error = found
    return len(path), [int(part) for part in path if part.isdigit()], not error["type"].endswith("_type")


def _fields_at(kind: object, path: Sequence[str]) -> set[str]:
    """The fields that the object at `path` may have. kind: the whole value's type."""
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):  # a list, or several types
        return {name for inner in get_args(kind) for name in _fields_at(inner, path)}
    if not path:
        return {*kind.model_fields}
    field = kind.model_fields.get(path[0])
    return _fields_at(field.annotation, path[1:]) if field else set()


def field_error(errors: Sequence[Mapping[str, Any]], body: object, model: object = None) -> ApiError:
    """The answer to pydantic's list of errors in a body for `model`, about the first field and the deepest place in it,
    because pydantic reports a value of a union type as wrong for each member."""
    first_errors = (each for each in errors if each["loc"][:2] == errors[0]["loc"][:2])
    by_kind = dict[tuple[str, ...], Mapping[str, Any]]()  # the first error for each member
    for each in first_errors:
        by_kind.setdefault(tuple(part for part in each["loc"] if not isinstance(part, int)), each)
    path, first = max(((_path(each, body), each) for each in by_kind.values()), key=_specificity)
    param, name = ".".join(path) or None, path[0] if path else ""
    if first["type"] == "extra_forbidden":
        is_own = param in _OWN_FIELDS
        instead = "send it in the object onesweep" if is_own else INSTEAD.get(param or "")
        guess = "" if instead else close_to(path[-1], _fields_at(model, [p for p in path[:-1] if not p.isdigit()]))
        words = f"unknown or unsupported field {param!r}{guess}: {instead or 'leave it out'}"
        return ApiError(400, words, param=param, code="unknown_field")
    if (expected := _EXPECTED.get(first["type"])) is None:  # a sentence of ours
        words = str(first["msg"]).removeprefix("Value error, ")
        if param is None and isinstance(body, dict):
            named = (word for word in re.findall(r"\w+", words) if word in body)
            return ApiError(400, words, param=next(named, None))
        return ApiError(400, f"{param or 'the body'}: {words}", param=param)
    expected = expected.format(**first.get("ctx", {})).replace("False", "false")
    expected = _EXPECTED_IN.get((name, len(path) > 1, first["type"]), expected)
    words = f"{param or 'the body'} {expected}"
    if first["input"] != "" and isinstance(first["input"], int | float | str):
        words += f", not {json.dumps(first['input'])[:_SHOWN]}"
    if first["type"] == "literal_error" and path[-1] not in ("role", "response_format") and name in INSTEAD:
        words += f": {INSTEAD[name]}"
    return ApiError(400, words, param=param)


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer in ASCII, so that no text can break the answer itself."""
    return Response(json.dumps(content), status, {"cache-control": "no-store", **(headers or {})}, "application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.body, error.status_code, error.headers)
