"""A topology in etcd (3.4 or newer): the value of one key, read over its HTTP gateway."""

import re
import time
from http import HTTPStatus
from json import loads
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from etcd3gw.client import Etcd3Client
from etcd3gw.exceptions import Etcd3Exception

from serving.router.topology import ETCD, ETCD_SHAPE, MAX_SHOWN, Topology, parse_topology
from stages.errors import InputError, ServiceError
from stages.wire.channel import is_loopback, parse_address

REQUEST_TIMEOUT_S = 2.0  # to connect, and between two pieces of an answer
ANSWER_S = 5.0  # for the whole answer
MAX_ANSWER_BYTES = 4 << 20  # more than an answer with the largest value that etcd stores
PIECE_BYTES = 64 << 10
API = "/v3/"  # since etcd 3.4
MAX_WORDS = 160


class EtcdTopology:
    """The topology under one key, read from any member of the cluster, starting with the one that answered last."""

    def __init__(self, url: str, insecure: bool = False) -> None:
        """:param url: shaped as ETCD_SHAPE. Raises InputError."""
        self._where, _, query = url.partition("?")
        members, _, key = self._where.removeprefix(ETCD).partition("/")
        files = dict(parse_qsl(query, keep_blank_values=True))
        if not re.fullmatch(r"[A-Za-z0-9._/-]+", key) or files.keys() - {"ca", "cert", "key"}:
            raise InputError(f"--topology {url[:MAX_SHOWN]!r} must be a file, or {ETCD_SHAPE}")
        if ("cert" in files) != ("key" in files):
            raise InputError("--topology: cert=FILE and key=FILE belong together: give both, or neither")
        if absent := [path for path in files.values() if not Path(path).is_file()]:
            raise InputError(f"--topology: {absent[0]} does not exist")
        self._key = f"/{key}"
        self._members = [_member(address, files, insecure) for address in members.split(",")]

    def __str__(self) -> str:
        return self._where

    def read(self) -> Topology:
        """Raises ServiceError if no member answers or the key is missing, ConfigError for a wrong value."""
        problems = []
        for member in tuple(self._members):
            try:
                found = member.get(self._key)
                break
            except Exception as error:  # the libraries below let many exceptions through, and an answer can be anything
                problems.append(f"{member.host}:{member.port} {_words(error)}")
                self._members.append(self._members.pop(0))
        else:
            raise ServiceError(f"no etcd answers at {self} ({'; '.join(problems)}): start it, or correct --topology")
        if not found:
            raise ServiceError(f"etcd has no key {self._key}: `etcdctl put {self._key} < topology.toml` puts it there")
        return parse_topology(found[0], str(self))


class EtcdMember(Etcd3Client):
    """One member of a cluster, with a limit on the size and time of its answers."""

    def post(self, url: str, *args: Any, json: Any = None, **kwargs: Any) -> Any:  # noqa: ANN401 - the library's type
        """Post a request and return the answer: every method of the library comes through here."""
        body, deadline = bytearray(), time.monotonic() + ANSWER_S
        with self.session.post(url, json=json, timeout=self.timeout, stream=True) as response:
            while piece := response.raw.read1(PIECE_BYTES):
                body += piece
                if len(body) > MAX_ANSWER_BYTES or time.monotonic() > deadline:
                    raise ValueError(f"an answer of more than {MAX_ANSWER_BYTES >> 20} MiB or {ANSWER_S:.0f} s")
        if response.status_code != HTTPStatus.OK:
            raise Etcd3Exception(body.decode(errors="replace"))
        # other servers answer with JSON too: only etcd's has a header, even without keys
        if "header" not in (answer := loads(body)):
            raise ValueError("an answer without a header")
        return answer


def _member(address: str, files: dict[str, str], insecure: bool) -> EtcdMember:
    host, port = parse_address(address, "etcd's address")
    if not files and not insecure and not is_loopback(address):
        raise InputError(
            f"etcd at {address} is on another machine and traffic would not be encrypted: add ?ca=FILE to its URL, or "
            "accept it with --insecure"
        )
    tls = (files.get("ca"), files.get("key"), files.get("cert"))
    member = EtcdMember(host, port, "https" if files else "http", *tls, timeout=REQUEST_TIMEOUT_S, api_path=API)
    member.session.trust_env = False  # dial etcd directly, whatever web proxy the environment names
    member.session.max_redirects = 0
    return member


def _words(error: Exception) -> str:
    """The end of a sentence that begins with the member's address."""
    detail = str(getattr(error, "detail_text", None) or error)
    if "refused" in detail:
        return "refuses connections"
    cause = detail.partition("(Caused by ")[2] or detail
    return f"does not answer as etcd 3.4 or newer does ({type(error).__name__}: {cause[:MAX_WORDS]!r})"
