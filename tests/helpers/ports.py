"""Ports of loopback for servers that a test starts later: nobody else takes them in the meantime.

They lie below those that the kernel deals out to connections, and are dealt out here once each, to all of the
processes that run tests on this machine.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path

_FIRST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LAST_DEALT = Path(tempfile.gettempdir()) / f"elastic-adapter-tests-{os.getuid()}.port"


def free_ports(count: int) -> list[int]:
    end = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32_768
    with os.fdopen(os.open(_LAST_DEALT, os.O_RDWR | os.O_CREAT, 0o600), "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        port = int(file.read() or _FIRST)
        found: list[int] = []
        for _ in range(_FIRST, end):
            port = port + 1 if _FIRST <= port < end - 1 else _FIRST
            if _is_free(port):
                found.append(port)
            if len(found) == count:
                break
        file.seek(0)
        file.truncate()
        file.write(str(port))
    assert len(found) == count, f"there are no {count} free ports from {_FIRST} to {end - 1}"
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("", port))
        except OSError:
            return False
    return True
