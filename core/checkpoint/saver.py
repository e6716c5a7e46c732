"""The process that writes checkpoints: one per node, of low priority, without a framework. It outlives the workers.

    python -m elastic_adapter.core.checkpoint.saver CHANNEL_FD

It takes orders from its channel, one after the other, and answers each. At the end of the channel it ends, when it has
done what it had been asked for.

    {"save": PATH}    write what this buffer holds into its draft, and let the buffer be filled again
    {"finish": ...}   make a checkpoint of a draft that all have written to, verify it, and delete what is not kept
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from elastic_adapter.core import frames
from elastic_adapter.core.checkpoint.manifest import BadManifest
from elastic_adapter.core.checkpoint.order import order_from_bytes
from elastic_adapter.core.checkpoint.saving import finish, write_part
from elastic_adapter.core.checkpoint.staging import StagingBuffer
from elastic_adapter.core.checkpoint.store import Checkpoint, Store
from elastic_adapter.core.errors import ElasticError

_IO_PRIORITY_IDLE = 3 << 13
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}


def main() -> None:
    channel = int(sys.argv[1])
    _step_back()
    while (message := frames.read(channel)) is not None:
        answer = _answer(message)
        try:
            frames.write(channel, answer)
        except OSError:
            # Whoever asked is gone. What was asked for is done.
            return


def _answer(message: dict[str, Any]) -> dict[str, object]:
    """What came of a request; a failure is an answer as well, in words."""
    try:
        if "save" in message:
            return {"saved": save(Path(str(message["save"])))}
        return {"finished": complete(**message["finish"])}
    except (OSError, ValueError, KeyError, TypeError, ElasticError) as error:
        return {"failed": _words(error), "request": message}


def save(path: Path) -> dict[str, object]:
    """Write what a worker left in this buffer. Raises ValueError where there is nothing whole in it."""
    buffer = StagingBuffer.open(path)
    try:
        held = buffer.take()
        if held is None:
            raise ValueError(f"{path} holds no state that is whole")
        order = order_from_bytes(held.order)
        try:
            draft = write_part(order, held.data)
        finally:
            held.data.release()
            # What could not be written is not kept for another time: the next state is worth more.
            buffer.release()
    finally:
        buffer.close()
    return {"root": order.root, "draft": draft.path.name, "step": order.step, "rank": order.rank}


def complete(
    root: str,
    step: int,
    generation: int,
    token: str,
    world_size: int,
    *,
    verify: str = "sample",
    md5: bool = False,
    keep_last: int | None = None,
    keep_every: int | None = None,
) -> dict[str, object]:
    """Finish a draft. It is read back from the storage before it counts as saved, and before any other is deleted."""
    store = Store(Path(root))
    place = finish(store.draft(step, generation, token), world_size, md5=md5)
    found = store.look(place.name)
    why = store.trouble(found, how=verify, stored=True) if isinstance(found, Checkpoint) else found.why
    if why:
        broken = store.quarantine(place)
        raise OSError(f"{why}; what was written is not what was read back, and is kept as {broken.name}")
    return {"path": str(place), "step": step, "pruned": list(store.prune(keep_last, keep_every))}


def _step_back() -> None:
    """Take only what the training leaves: of the processors, and of the disks."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.nice(10)
    with contextlib.suppress(OSError, AttributeError):
        import ctypes

        number = _IOPRIO_SET.get(os.uname().machine)
        if number is not None:
            ctypes.CDLL(None).syscall(number, 1, 0, _IO_PRIORITY_IDLE)


def _words(error: Exception) -> str:
    if isinstance(error, BadManifest | ElasticError | ValueError):
        return str(error)
    if isinstance(error, OSError) and error.strerror is not None:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
