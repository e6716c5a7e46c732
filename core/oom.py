"""Whether the kernel ended a process for want of memory: its counters, of this cgroup or of the whole system."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


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


def _candidates(proc: Path, cgroups: Path) -> Iterable[Path]:
    """Our own cgroup's, version 2 or 1; in a container its root is where the path ends. Then the whole system's."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inner = path.lstrip("/")
        if not controllers:
            yield cgroups / inner / "memory.events"
            yield cgroups / "memory.events"
        elif "memory" in controllers.split(","):
            yield cgroups / "memory" / inner / "memory.oom_control"
            yield cgroups / "memory" / "memory.oom_control"
    yield proc / "vmstat"


def _count(path: Path) -> int | None:
    try:
        words = dict(line.split()[:2] for line in path.read_text().splitlines() if len(line.split()) > 1)
        return int(words["oom_kill"])
    except (OSError, KeyError, ValueError):
        return None
