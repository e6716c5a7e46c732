"""Whether the local workers are past their start, seen from outside: by their connections and the CPU's idling."""

from __future__ import annotations

import contextlib
import os

_ESTABLISHED = "01"
# As much idle CPU as an import takes: with less, it would be felt by those who work.
AT_REST_CPUS = 0.9
# From when on standbys are made although the CPU never rests: they run at the lowest priority.
_BUSY_ENOUGH_S = 3.0
# A script that forms no group is past its start when the CPU has rested this long, this long after its start.
_REST_S = 1.0
_NO_GROUP_S = 2.0
# If it never rests either, it is taken to be past its start after this long.
_LONGEST_START_S = 15.0


def past_the_start(running_s: float, resting_s: float, joined_s: float | None) -> bool:
    """Whether a generation no longer needs the CPU for its start. Pure.

    ``running_s``: since it was started; ``resting_s``: since the CPU was last busy; ``joined_s``: since all local
    ranks have joined their group, None while they have not.
    """
    if joined_s is not None:
        return resting_s > 0 or joined_s >= _BUSY_ENOUGH_S
    return running_s >= _LONGEST_START_S or (running_s >= _NO_GROUP_S and resting_s >= _REST_S)


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
