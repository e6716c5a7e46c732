"""Whether the local workers are past their start, seen from outside: by their connections and the CPU's idling."""

from __future__ import annotations

import contextlib
import os

_ESTABLISHED = "01"


def connections_to(port: int) -> int:
    """How many connections of this host lead to this port: each worker that has joined its group holds one."""
    return sum(_count(path, port) for path in ("/proc/net/tcp", "/proc/net/tcp6"))


def _count(path: str, port: int) -> int:
    suffix = f":{port:04X}"
    count = 0
    with contextlib.suppress(FileNotFoundError), open(path) as file:
        next(file)
        for line in file:
            _, _, remote, state, *_ = line.split(maxsplit=4)
            count += remote.endswith(suffix) and state == _ESTABLISHED
    return count


def cpu_ticks() -> tuple[int, int]:
    """Idle and total time of all CPUs so far, in ticks."""
    with open("/proc/stat") as file:
        fields = [int(word) for word in file.readline().split()[1:9]]
    return fields[3] + fields[4], sum(fields)


def idle_cpus(before: tuple[int, int], after: tuple[int, int]) -> float:
    """How many CPUs' worth of time was idle between two readings."""
    total = after[1] - before[1]
    return (after[0] - before[0]) / total * (os.cpu_count() or 1) if total else 0.0
