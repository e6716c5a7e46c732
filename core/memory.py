"""A registry in this process's memory: for one node, where nothing must outlive the process."""

from __future__ import annotations

from elastic_adapter.core.errors import Fenced
from elastic_adapter.core.ports import Leader, Note, Record, missed

_NOTES = 1000


class MemoryRegistry:
    """The registry of a standalone job. The first to campaign leads for good."""

    def __init__(self) -> None:
        self._leader: Leader | None = None
        self._record = Record()
        self._notes: dict[tuple[int, int], Note] = {}

    async def campaign(self, node: str, address: str) -> Leader:
        if self._leader is None:
            self._leader = Leader(node, address, epoch=1)
        return self._leader

    async def load(self) -> Record:
        return self._record

    async def commit(self, epoch: int, record: Record, *, after: int) -> None:
        self._check(epoch)
        now = self._record.generation
        if now == after:
            self._record = record
        elif self._record != record:
            raise Fenced(epoch, epoch, missed(after, now))

    async def note(self, epoch: int, notes: tuple[Note, ...]) -> None:
        self._check(epoch)
        self._notes.update({(each.epoch, each.number): each for each in notes})
        for key in sorted(self._notes)[:-_NOTES]:
            del self._notes[key]

    async def notes(self) -> tuple[Note, ...]:
        return tuple(self._notes[key] for key in sorted(self._notes))

    def _check(self, epoch: int) -> None:
        current = self._leader.epoch if self._leader is not None else 0
        if epoch != current:
            raise Fenced(epoch, current)
