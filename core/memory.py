"""A registry in this process's memory: for one node, where nothing must outlive the process."""

from __future__ import annotations

from elastic_adapter.core.errors import Fenced
from elastic_adapter.core.ports import Leader, Record


class MemoryRegistry:
    """The registry of a standalone job. The first to campaign leads for good."""

    def __init__(self) -> None:
        self._leader: Leader | None = None
        self._record = Record()

    async def campaign(self, node: str, address: str) -> Leader:
        if self._leader is None:
            self._leader = Leader(node, address, epoch=1)
        return self._leader

    async def load(self) -> Record:
        return self._record

    async def commit(self, epoch: int, record: Record) -> None:
        current = self._leader.epoch if self._leader is not None else 0
        if epoch != current:
            raise Fenced(epoch, current)
        self._record = record
