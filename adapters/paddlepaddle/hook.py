"""Run in a worker when it has imported paddle: rank 0's store is reached without losing time.

Paddle's client sleeps for three seconds when it is refused once: here a worker looks every few milliseconds, and calls
paddle's own function when somebody listens. And each of its requests is written in several pieces to a socket that
waits for an answer to the first (Nagle's algorithm, against a delayed acknowledgement), 40 ms every time: here the
store's connections do not wait. Standard library only; a script sees no difference but the time.

``woken`` is called when a standby learns its place: it undoes what the import did for want of a rank.
"""

import contextlib
import functools
import logging
import os
import socket
import sys
import time
from types import ModuleType

_LOOK_EVERY_S = 0.005
# After this time paddle's own patience, and its words, take over.
_LONGEST_S = 60.0


def woken() -> None:
    """Only rank 0 logs to the console what paddle.Model tells; without a rank, paddle takes itself for rank 0."""
    if os.environ.get("PADDLE_TRAINER_ID", "0") != "0":
        logging.getLogger("hapi").handlers.clear()


def _quicken(core: ModuleType) -> None:
    """Put ours around the function that makes the store; the first call takes it away again."""
    original = getattr(core, "create_or_get_global_tcp_store", None)
    if original is None:
        return

    @functools.wraps(original)
    def create_or_get_global_tcp_store() -> object:
        core.create_or_get_global_tcp_store = original  # type: ignore[attr-defined]
        host, _, port = os.environ.get("PADDLE_MASTER", "").rpartition(":")
        if not port.isdecimal():
            return original()
        if os.environ.get("PADDLE_TRAINER_ID", "0") != "0":
            _wait_for_listener(host.strip("[]"), int(port))
        # All ranks are connected when it returns.
        store = original()
        _do_not_delay(int(port))
        return store

    core.create_or_get_global_tcp_store = create_or_get_global_tcp_store  # type: ignore[attr-defined]


def _wait_for_listener(host: str, port: int) -> None:
    end = time.monotonic() + _LONGEST_S
    while time.monotonic() < end:
        try:
            socket.create_connection((host, port), 1.0).close()
        except OSError:
            time.sleep(_LOOK_EVERY_S)
        else:
            return


def _do_not_delay(port: int) -> None:
    """Send small pieces at once on all connections from or to this port that the process has."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            ends = (connection.getsockname(), connection.getpeername())
            if any(isinstance(end, tuple) and end[1] == port for end in ends):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


_core = sys.modules.get("paddle.base.core")
if _core is not None:
    _quicken(_core)
