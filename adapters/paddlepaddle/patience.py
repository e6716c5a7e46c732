"""Run in a worker when it has imported paddle: nobody asks for rank 0's store before it listens.

Paddle's client sleeps for three seconds when it is refused once. Here the worker looks every few milliseconds, and
calls paddle's own function when somebody listens. Standard library only; a script sees no difference but the time.
"""

import functools
import os
import socket
import sys
import time

_LOOK_EVERY_S = 0.005
# After this time paddle's own patience, and its words, take over.
_LONGEST_S = 60.0


def _wait_for_store() -> None:
    host, _, port = os.environ.get("PADDLE_MASTER", "").rpartition(":")
    if not port.isdecimal() or os.environ.get("PADDLE_TRAINER_ID", "0") == "0":
        return
    end = time.monotonic() + _LONGEST_S
    while time.monotonic() < end:
        try:
            socket.create_connection((host.strip("[]"), int(port)), 1.0).close()
        except OSError:
            time.sleep(_LOOK_EVERY_S)
        else:
            return


def _patient(core: object) -> None:
    original = getattr(core, "create_or_get_global_tcp_store", None)
    if original is None:
        return

    @functools.wraps(original)
    def create_or_get_global_tcp_store() -> object:
        core.create_or_get_global_tcp_store = original  # type: ignore[attr-defined]
        _wait_for_store()
        return original()

    core.create_or_get_global_tcp_store = create_or_get_global_tcp_store  # type: ignore[attr-defined]


_core = sys.modules.get("paddle.base.core")
if _core is not None:
    _patient(_core)
