"""Run in a worker when it has imported paddle: rank 0's store is reached without losing time.

Paddle's client sleeps for three seconds when it is refused once: here a worker looks every few milliseconds, and calls
paddle's own function when somebody listens. And each of its requests is written in several pieces to a socket that
waits for an answer to the first (Nagle's algorithm, against a delayed acknowledgement), 40 ms every time: here the
store's connections do not wait. Standard library only; a script sees no difference but the time.

Groups beyond the first share keys in that store: a rank may read where its peer listened for the group before, and is
refused ("Connection refused" in ProcessGroupGloo.create; rare with the delays above, frequent without). So every later
group of gloo gets a store of its own, at its first rank.

``woken`` is called when a standby learns its place: it undoes what the import did for want of a rank.
"""

import contextlib
import functools
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

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


# Stores must outlive their groups.
_stores: list[object] = []


def _separate(core: ModuleType) -> None:
    """Give every group of gloo but the first a store of its own."""
    gloo, make = getattr(core, "ProcessGroupGloo", None), getattr(core, "TCPStore", None)
    if gloo is None or make is None:
        return
    original = gloo.create
    seen: list[int] = []

    def create(store: Any, rank: int, world_size: int, group_id: int = 0) -> object:
        seen.append(group_id)
        if len(seen) > 1 and world_size > 1:
            store = _own_store(make, store, rank, f"elastic/gloo/{group_id}/{seen.count(group_id)}")
        return original(store, rank, world_size, group_id)

    gloo.create = staticmethod(create)


def _own_store(make: Callable[..., object], store: Any, rank: int, key: str) -> object:
    """The first rank of a group hosts it, and says where in the store that all have."""
    if rank == 0:
        host = os.environ.get("PADDLE_CURRENT_ENDPOINT", "127.0.0.1:0").rpartition(":")[0]
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
            free.bind((host.strip("[]"), 0))
            port = free.getsockname()[1]
        own = make(host, port, True, 1)
        store.set(key, f"{host} {port}")
    else:
        host, _, text = store.get(key).decode().partition(" ")
        port = int(text)
        own = make(host, port, False, 1)
    _stores.append(own)
    _do_not_delay(port)
    return own


_core = sys.modules.get("paddle.base.core")
if _core is not None:
    _quicken(_core)
    _separate(_core)
