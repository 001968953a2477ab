"""Free ports of this machine, reserved between processes."""

import contextlib
import secrets
import socket
from collections import deque
from collections.abc import Mapping

from stages.errors import ServiceError
from stages.wire.channel import is_loopback, parse_address

# Below the ports that systems use for outgoing connections, above most well-known ones.
PORTS = range(20_000, 32_000)
MAX_BLOCKS = 32
TRIES = 10_000

_kept: deque[contextlib.ExitStack] = deque()


def free_port_block(count: int) -> int:
    """Reserve `count` free neighbouring loopback ports; returns the first. Raises ServiceError if there are none."""
    # a datagram socket with the same number reserves a port between processes: it blocks no server, and closes with
    # this process or after MAX_BLOCKS further calls

    for _ in range(TRIES):
        first = PORTS.start + secrets.randbelow(len(PORTS) - count)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket(type=socket.SOCK_DGRAM)).bind(("127.0.0.1", port))
            if all(port_free("127.0.0.1", port) for port in range(first, first + count)):
                _kept.append(stack.pop_all())
                if len(_kept) > MAX_BLOCKS:
                    _kept.popleft().close()
                return first
    raise ServiceError(f"no {count} consecutive loopback ports are free: stop some of the programs that listen there")


def port_free(host: str, port: int) -> bool:
    """True if a server could listen there now."""
    with contextlib.suppress(OSError):
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]  # as the gateway: a name may mean ::1
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return True
    return False


def check_free(listeners: Mapping[str, str]) -> None:
    """Raise ServiceError if one of these named servers could not listen at its address on this machine."""
    for name, address in listeners.items():
        if not is_loopback(address):
            raise ServiceError(
                f"{name} listens on {address}, which is not loopback: `up` starts processes on this machine only; "
                "start that one on its machine with `onesweep host`, `onesweep router` or `onesweep http`"
            )
        if not port_free(*parse_address(address)):
            raise ServiceError(
                f"{address}, where {name} should listen, is in use: stop what listens there (a deployment "
                "with `onesweep down`), or give another topology, --port or --http"
            )
