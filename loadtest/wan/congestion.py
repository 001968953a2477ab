"""TCP's congestion control of a namespace."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from loadtest.wan.namespace import LabError

IPV4 = Path("/proc/sys/net/ipv4")


def set_tcp(congestion: str, slow_start_after_idle: bool) -> None:
    """Set the namespace that this thread is in. Raises LabError for a congestion control that cannot be had."""
    available: list[str] = []
    try:
        (IPV4 / "tcp_slow_start_after_idle").write_text(f"{int(slow_start_after_idle)}\n")
        available = (IPV4 / "tcp_available_congestion_control").read_text().split()
        (IPV4 / "tcp_congestion_control").write_text(f"{congestion}\n")
    except FileNotFoundError:  # what the kernel says of a name it does not know
        raise LabError(
            f"this kernel has no congestion control {congestion!r}; it has {', '.join(sorted(available))} "
            f"(others are modules: modprobe tcp_{congestion})"
        ) from None
    except OSError as error:
        raise LabError(
            f"cannot set congestion control {congestion!r} under {IPV4}: {error.strerror}; a lab needs /proc/sys "
            f"writable, and {congestion} in net.ipv4.tcp_allowed_congestion_control"
        ) from None


@contextlib.contextmanager
def allowed(congestion: str) -> Iterator[None]:
    """Let new namespaces use it for the length of a `with` block, in the machine's own namespace.

    Elsewhere a kernel refuses what is not on this list, and one that was built for BBR does not have cubic there. The
    list is read when a namespace is set, not later. Where it cannot be written, `set_tcp` says what is the matter.
    """
    path = IPV4 / "tcp_allowed_congestion_control"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            lock = stack.enter_context(path.open())
            fcntl.flock(lock, fcntl.LOCK_EX)  # two labs must not take each other's change for the machine's own
            before = lock.read()
            if congestion not in before.split():
                path.write_text(f"{before.strip()} {congestion}\n")
                stack.callback(path.write_text, before)
        yield
