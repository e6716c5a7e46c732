"""The process that writes checkpoints: one per node, of low priority, without a framework. It outlives the workers.

It takes orders from its channel, one after the other, and answers each. At the end of the channel it ends, when it has
done what it had been asked for; buffers that it was told of at its start, and that nobody else has by then, it removes.
All may be asked for again, by whoever does not know whether it was done.

    {"save": PATH}      write what this buffer holds into its draft, and let the buffer be filled again. With "part",
                        which says what it holds, it may be asked for again when that has been done
    {"prepare": ...}    put a draft together that all have written to, and read it back; it is not a checkpoint yet
    {"publish": ...}    make a checkpoint of what was prepared, and delete what is not kept
    {"drop": ...}       delete a draft that nothing will come of

Answers: {"saved": ...}, {"prepared": ...}, {"published": ...}, {"dropped": ...}, or {"failed": WORDS, "request": ...}.
See ``command`` for how it is started.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from elastic_adapter.core import frames
from elastic_adapter.core.checkpoint.order import Order, order_from_bytes
from elastic_adapter.core.checkpoint.saving import has_part, prepare, write_part
from elastic_adapter.core.checkpoint.shared_folder import is_last
from elastic_adapter.core.checkpoint.staging import StagingBuffer
from elastic_adapter.core.checkpoint.store import Checkpoint, Store
from elastic_adapter.core.errors import ElasticError

_IO_PRIORITY_IDLE = 3 << 13
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_FULL = (errno.ENOSPC, errno.EDQUOT)
_WHAT_TO_DO = {
    **dict.fromkeys(_FULL, "make room there, or keep fewer with keep_last"),
    errno.EROFS: "it is mounted to be read only",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "this user may not write there"),
}


def main() -> None:
    channel, inherited = int(sys.argv[1]), sys.argv[2:]
    _step_back()
    while (message := _next(channel)) is not None:
        answer = _answer(message)
        # Whoever asked may be gone: what else was asked for is done all the same.
        with contextlib.suppress(OSError):
            frames.write(channel, answer)
    if inherited and is_last(int(inherited[0])):
        for path in inherited[1:]:
            _remove(path)


def _next(channel: int) -> dict[str, Any] | None:
    try:
        return frames.read(channel)
    except OSError:
        # The end of a channel on which answers were left unread.
        return None


def _remove(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.unlink(path)


def _answer(message: dict[str, Any]) -> dict[str, object]:
    """What came of a request; a failure is an answer as well, in words."""
    known: dict[str, object] = {}
    try:
        if "save" in message:
            return {"saved": save(Path(str(message["save"])), known, message.get("part"))}
        if "prepare" in message:
            return {"prepared": put_together(**message["prepare"])}
        if "drop" in message:
            return {"dropped": drop(**message["drop"])}
        return {"published": publish(**message["publish"])}
    except (OSError, ValueError, KeyError, TypeError, ElasticError) as error:
        return {"failed": words(error), "request": message, **known}


def save(path: Path, known: dict[str, object] | None = None, part: dict[str, Any] | None = None) -> dict[str, object]:
    """Write what a worker left in this buffer. Raises ValueError where there is nothing whole in it.

    ``known`` is told what is being saved, for whoever has to tell that it failed.
    """
    known = {} if known is None else known
    known["path"] = str(path)
    buffer = StagingBuffer.open(path)
    try:
        if part is not None and buffer.step != part["step"]:
            # Whoever was asked first has let it go, and was killed before it could say so.
            return {**known, **part, "draft": _written_before(**part)}
        held = buffer.take()
        if held is None:
            raise ValueError(f"{path} holds no state that is whole")
        try:
            order = order_from_bytes(held.order)
            known |= _facts(order)
            draft = write_part(order, held.data)
        finally:
            held.data.release()
            # What could not be written is not kept for another time: the next state is worth more.
            buffer.release()
    finally:
        buffer.close()
    return {**known, "draft": draft.path.name}


def _written_before(root: str, step: int, generation: int, token: str, rank: int) -> str:
    draft = Store(Path(root)).begun(step, generation, token)
    if not has_part(draft, rank):
        raise ValueError(f"the state of step {step} is not there any more")
    return draft.path.name


def _facts(order: Order) -> dict[str, object]:
    return {
        "root": order.root,
        "step": order.step,
        "generation": order.generation,
        "token": order.token,
        "rank": order.rank,
    }


def put_together(
    root: str, step: int, generation: int, token: str, world_size: int, *, verify: str = "sample", md5: bool = False
) -> dict[str, object]:
    """Prepare a draft. It is read back from the storage before anybody may count on it."""
    name = prepare(Store(Path(root)).begun(step, generation, token), world_size, verify=verify, md5=md5)
    return {"name": name, "step": step, "generation": generation}


def publish(
    root: str, step: int, generation: int, token: str, *, keep_last: int | None = None, keep_every: int | None = None
) -> dict[str, object]:
    """Make it a checkpoint. Only then others are deleted: those not kept, and drafts that it has overtaken."""
    store = Store(Path(root))
    draft = store.begun(step, generation, token)
    # Not by us: then what is there stays as it is, and what we have is of no use.
    existed = draft.path.exists() and isinstance(store.look(draft.place.name), Checkpoint)
    place = draft.publish()
    pruned = store.prune(place.name, keep_last, keep_every)
    store.sweep_overtaken(step, generation, token)
    return {"path": str(place), "name": place.name, "step": step, "pruned": list(pruned), "existed": existed}


def drop(root: str, step: int, generation: int, token: str) -> dict[str, object]:
    """Delete a draft, if it is there. One that was published, or put aside for people to look at, is none."""
    draft = Store(Path(root)).begun(step, generation, token)
    draft.discard()
    return {"draft": draft.path.name, "step": step}


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


def words(error: Exception) -> str:
    """One line for people: what, where, and what they can do."""
    if isinstance(error, OSError) and error.strerror is not None:
        where = f"{error.filename}: " if error.filename is not None else ""
        advice = _WHAT_TO_DO.get(error.errno or 0)
        more = f" ({advice}); the last good checkpoint is untouched" if advice else ""
        return f"{where}{error.strerror}{more}"
    if isinstance(error, KeyError | TypeError):
        return f"{type(error).__name__}: {error}"
    return str(error)
