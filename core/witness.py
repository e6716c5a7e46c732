"""What workers that hang are doing, as far as their stacks tell; and the files that hold these stacks."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from elastic_adapter.core.dump import Dump, Dumpable, StackDumper
from elastic_adapter.core.model import StackReport
from elastic_adapter.core.processes import BOOTSTRAP
from elastic_adapter.core.stacks import Frame, parse, place, waits_for_others
from elastic_adapter.core.workers import Worker

# Of the innermost frames so many are told; the file has them all.
_TOLD = 30


class Witness:
    """Looks at the workers of one node. ``folder`` is where the files go; None: one of its own, made when needed."""

    def __init__(self, dumper: StackDumper, job_id: str, folder: Path | None) -> None:
        self._dumper = dumper
        self._job_id = job_id
        # Whoever reads of the files may be elsewhere.
        self._folder = None if folder is None else folder.absolute()

    async def look(self, workers: Sequence[Worker]) -> tuple[StackReport, ...]:
        """Where each of them is."""
        living = [worker for worker in workers if worker.process.alive]
        dumps = await self._dumper.dump([self._dumpable(worker) for worker in living])
        return tuple(_report(worker, dump) for worker, dump in zip(living, dumps, strict=True))

    def _dumpable(self, worker: Worker) -> Dumpable:
        if self._folder is None:
            name = re.sub(r"[^\w.-]", "_", self._job_id)
            self._folder = Path(tempfile.mkdtemp(prefix=f"elastic-stacks-{name}-"))
        seat = worker.seat
        file = self._folder / f"stacks_generation_{seat.assignment.generation}_rank_{seat.rank}.txt"
        return Dumpable(seat.local_rank, worker.process, worker.stacks, file)


def _report(worker: Worker, dump: Dump) -> StackReport:
    stack = parse(dump.text)
    where, waits, words = "", "", dump.state or dump.source
    if stack is not None:
        frames = [frame for frame in stack.frames if frame.file != BOOTSTRAP]
        where, words = place(stack), "\n".join(map(_line, frames[:_TOLD]))
        # Whoever is stopped waits for nobody, whatever it was about to wait for.
        where, waits = (f"{where}: {dump.state}", "") if dump.state else (where, waits_for_others(stack) or "")
    file = str(dump.file) if dump.file is not None else ""
    return StackReport(worker.seat.rank, where, waits, words, file, worker.process.pid, time.time())


def _line(frame: Frame) -> str:
    return f'File "{frame.file}", line {frame.line}, in {frame.function}'
