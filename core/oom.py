"""What the kernel lets us have of memory, and whether it ended a process for want of it: its limits and its counters.

They are those of our own cgroup, version 2 or 1, and of those above it; the counters also those of the whole system.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath

# The files of a limit and of what is used of it, and what of that the kernel gives up before it refuses anything: files
# that were read once. Of version 2, and of version 1.
_LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


class OomCounter:
    """Tells whether processes were killed for want of memory since it was asked last."""

    def __init__(self, proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> None:
        self._files = tuple(path for path in _candidates(Path(proc), Path(cgroups)) if _count(path) is not None)
        self._last = self._now()

    def raised(self) -> bool:
        before, self._last = self._last, self._now()
        return self._last > before

    def _now(self) -> int:
        return sum(_count(path) or 0 for path in self._files)


def memory_left(proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> int | None:
    """How many bytes our cgroup still allows, or one above it that allows less; None: no limit is known."""
    found = (_left(group) for groups in _groups(Path(proc), Path(cgroups)) for group in groups)
    return min((left for left in found if left is not None), default=None)


def _candidates(proc: Path, cgroups: Path) -> Iterable[Path]:
    """Our own cgroup's; in a container its root is where the path ends. Then the whole system's."""
    for groups in _groups(proc, cgroups):
        for group in (groups[0], groups[-1]):
            yield group / "memory.events"
            yield group / "memory.oom_control"
    yield proc / "vmstat"


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, ...]]:
    """The folder of our own memory cgroup, and those above it, for each version. In a container, some are not there."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inner = PurePath(path.lstrip("/"))
        if not controllers:
            yield tuple(cgroups / each for each in (inner, *inner.parents))
        elif "memory" in controllers.split(","):
            yield tuple(cgroups / "memory" / each for each in (inner, *inner.parents))


def _left(group: Path) -> int | None:
    for limit, usage, spare in _LIMITS:
        try:
            most, used = int((group / limit).read_text()), int((group / usage).read_text())
        except (OSError, ValueError):
            # It is of the other version, or has no limit: then there is a word in the place of the number.
            continue
        return max(0, most - used + (_count(group / "memory.stat", spare) or 0))
    return None


def _count(path: Path, name: str = "oom_kill") -> int | None:
    try:
        words = dict(line.split()[:2] for line in path.read_text().splitlines() if len(line.split()) > 1)
        return int(words[name])
    except (OSError, KeyError, ValueError):
        return None
