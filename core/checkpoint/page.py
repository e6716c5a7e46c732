"""The page through which an agent asks one worker to save: a few machine words in a file in memory, one for each slot.

The worker writes how many steps it has done, then looks whether it is to wait. The agent says that it is to wait, then
looks how many steps are done. So whoever has done n steps when the agent looks waits at step n + 1, at the latest.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

# The generation; the steps done (the worker's); how often the worker was told to wait, and how often it was told where
# to save after that; that step; whether it does no further step then. All but the steps done are the agent's.
GENERATION, DONE, PAUSED, ANSWERED, SAVE_AT, HOLD = range(6)
_PAGE = struct.Struct("qqqqqq")
NOWHERE = -1


def open_page(path: str) -> memoryview[int]:
    """Raises OSError, or ValueError where it is no page."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return memoryview(mmap.mmap(fd, _PAGE.size)).cast("q")
    finally:
        os.close(fd)


class SavePages:
    """The pages of one node's slots, as its agent sees them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pages: dict[int, memoryview[int]] = {}

    def path(self, local_rank: int) -> str:
        """The page of this slot; made when it is asked for first."""
        path = self._folder / f"saves.{local_rank}"
        if local_rank not in self._pages:
            path.write_bytes(_PAGE.pack(0, 0, 0, 0, NOWHERE, 0))
            self._pages[local_rank] = open_page(str(path))
        return str(path)

    def begin(self, generation: int) -> None:
        """Workers of this generation come: nothing is asked of them yet."""
        for page in self._pages.values():
            page[DONE], page[SAVE_AT], page[HOLD] = 0, NOWHERE, 0
            page[ANSWERED] = page[PAUSED]
            page[GENERATION] = generation

    def pause(self) -> None:
        """Let every worker wait at its next step."""
        for page in self._pages.values():
            page[PAUSED] += 1

    def done(self, local_rank: int) -> int:
        return self._pages[local_rank][DONE]

    def answer(self, step: int | None, *, hold: bool = False) -> None:
        """Let those who wait go on: they save at this step, or nowhere."""
        for page in self._pages.values():
            if page[PAUSED] == page[ANSWERED]:
                # Nobody waits for this; but some may hold since the last one.
                page[PAUSED] += 1
            page[SAVE_AT] = NOWHERE if step is None else step
            page[HOLD] = int(hold)
            page[ANSWERED] = page[PAUSED]
