"""The page in which a worker tells how it gets on: a small file in memory for each slot of a node."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

# The generation, how often progress was told, the last step, who tells: as core.worker writes them.
_PAGE = struct.Struct("qqqq")


@dataclass(frozen=True, slots=True)
class Progress:
    count: int
    step: int


class ProgressPages:
    """The pages of one node's slots. A page outlives its worker: whoever reads it says which generation it means."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, local_rank: int) -> str:
        """The page of this slot; made when it is asked for first."""
        path = self.folder / f"progress.{local_rank}"
        if not path.exists():
            path.write_bytes(bytes(_PAGE.size))
        return str(path)

    def read(self, local_rank: int, generation: int) -> Progress | None:
        """How a worker of this generation got on; None: it told nothing."""
        try:
            written, count, step, _ = _PAGE.unpack((self.folder / f"progress.{local_rank}").read_bytes()[: _PAGE.size])
        except (OSError, struct.error):
            return None
        return Progress(count, step) if written == generation and count else None
