"""Makes a checkpoint of what workers left in their buffers. Needs no framework, and nobody who asks.

Each rank's part is written into the draft that all ranks share, and a part's own manifest beside it, last. When all
parts are there, any one who knows that can put the draft together, and then publish it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from elastic_adapter.core.checkpoint.files import Damaged, Skeleton, Written
from elastic_adapter.core.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    TensorEntry,
    manifest_from_bytes,
    manifest_to_bytes,
)
from elastic_adapter.core.checkpoint.order import FileOrder, Order, Stretch
from elastic_adapter.core.checkpoint.paddlefile import write_paddle
from elastic_adapter.core.checkpoint.store import Broken, Checkpoint, Draft, Store, look_at, merged, write_whole
from elastic_adapter.core.checkpoint.torchfile import write_torch
from elastic_adapter.core.errors import ElasticError

# By the names of frameworks, and of the formats of their files.
WRITERS = {"torch": write_torch, "paddle": write_paddle}
# So many ranks are named when parts are missing.
_MOST_NAMED = 8


class Unverified(ElasticError):
    """What was written is not what was read back. It never was a checkpoint, and is deleted."""


class Taken(ElasticError):
    """Another checkpoint has the name that this one was to have. That one stays, and this one is deleted."""


class Incomplete(ElasticError):
    """Not all ranks have written their part, as far as can be seen here."""


def write_part(order: Order, data: memoryview) -> Draft:
    """Write one rank's files into the draft of its checkpoint. Raises OSError where the storage does not take them."""
    draft = Store(Path(order.root)).draft(order.step, order.generation, order.token)
    try:
        # A training that went back comes to a step again: what was said of the old files is not true of the new ones.
        for name in (_part(order.rank), MANIFEST):
            (draft.path / name).unlink(missing_ok=True)
        return _write_part(draft, order, data)
    except BaseException:
        # Half a part is of no use, and on a disk that is full it is in the way of what comes next.
        _remove(draft, [*(file.name for file in order.files), _part(order.rank)])
        raise


def _write_part(draft: Draft, order: Order, data: memoryview) -> Draft:
    files = tuple(_write(draft, order, file, data) for file in order.files)
    part = Manifest(
        job=order.job,
        run=order.run,
        framework=order.framework,
        versions=order.versions,
        step=order.step,
        generation=order.generation,
        world_size=order.world_size,
        algorithm=order.algorithm,
        files=files,
        created_at=order.created_at,
        facts=order.facts,
    )
    write_whole(draft.path / _part(order.rank), manifest_to_bytes(part))
    return draft


def prepare(draft: Draft, world_size: int, *, verify: str = "off", md5: bool = False) -> str:
    """Put together what all ranks have written, and read it back. The name that it will have as a checkpoint.

    May be repeated, also when it has been published meanwhile. Raises Incomplete, Unverified or Taken, and OSError.
    """
    name = draft.place.name
    there = look_at(draft.place)
    if isinstance(there, Checkpoint) and not draft.path.exists():
        return name
    if isinstance(there, Checkpoint) or there.unread:
        draft.discard()
        raise Taken(taken(draft.place, unread="" if isinstance(there, Checkpoint) else there.why))
    is_prepared = isinstance(look_at(draft.path, name), Checkpoint)
    if not is_prepared and (absent := missing(draft, world_size)):
        raise Incomplete(_asking(draft, absent, world_size))
    try:
        _put_together(draft, name, world_size, verify, is_prepared=is_prepared, md5=md5)
    except (Damaged, OSError) as error:
        # Not kept: on a device that does this, one whole state would be left behind by each save.
        draft.discard()
        if isinstance(error, OSError):
            raise
        raise Unverified(f"{error}; what was written is not what was read back from the storage") from error
    return name


def _put_together(draft: Draft, name: str, world_size: int, verify: str, *, is_prepared: bool, md5: bool) -> None:
    names = [_part(rank) for rank in range(world_size)]
    if not is_prepared:
        draft.prepare(merged(manifest_from_bytes((draft.path / each).read_bytes()) for each in names), md5=md5)
    _remove(draft, names)
    read_back(look_at(draft.path, name), verify)


def read_back(found: Checkpoint | Broken, verify: str) -> None:
    """Look at what was just written, from the storage itself. Raises Damaged, or OSError where it can't be read."""
    if isinstance(found, Broken):
        raise Damaged(str(found.path), found.why)
    Store(found.path.parent).check(found, how=verify, stored=True)


def taken(place: Path, unread: str = "") -> str:
    """What to tell of a save whose name another checkpoint has; why that one can't be read, if it can't."""
    hindrance, remedy = (f"can't be read ({unread}), ", "make it readable") if unread else ("", "restore() it")
    return f"{place} was there before, {hindrance}and stays as it is: {remedy}, or name another folder"


def finish(draft: Draft, world_size: int, *, md5: bool = False) -> Path:
    """Make a checkpoint of a draft that all ranks have written their parts of."""
    prepare(draft, world_size, md5=md5)
    return draft.publish()


def missing(draft: Draft, world_size: int) -> tuple[int, ...]:
    """The ranks that have not written their part."""
    return tuple(rank for rank in range(world_size) if not has_part(draft, rank))


def has_part(draft: Draft, rank: int) -> bool:
    return (draft.path / _part(rank)).exists()


def take_back(draft: Draft, rank: int) -> None:
    """What this rank has written, or said of what it will not write, counts no longer: it comes to this step again."""
    for name in (_part(rank), missed_name(rank)):
        with contextlib.suppress(OSError):
            os.unlink(draft.path / name)


def missed_name(rank: int) -> str:
    """The file in a draft by which a rank says that its part will not come."""
    return f"missed.{rank}"


def _asking(draft: Draft, absent: tuple[int, ...], world_size: int) -> str:
    named = ", ".join(map(str, absent[:_MOST_NAMED])) + (" ..." if len(absent) > _MOST_NAMED else "")
    ranks = f"rank {named}" if len(absent) == 1 else f"ranks {named}"
    what = f"step {draft.step}: {ranks} of {world_size} wrote nothing that is seen in {draft.root}"
    return f"{what}; is this folder shared by all nodes, under the same path?"


def _remove(draft: Draft, names: list[str]) -> None:
    """Whatever of this is there; and the draft with it, if nothing else is in it."""
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(draft.path / name)
    with contextlib.suppress(OSError):
        os.rmdir(draft.path)


def _part(rank: int) -> str:
    return f"part.{rank}.json"


def _write(draft: Draft, order: Order, file: FileOrder, data: memoryview) -> FileEntry:
    skeleton = Skeleton.unpack(_of(data, file.skeleton))
    payloads = [_of(data, payload) for payload in file.payloads]
    with draft.file(file.name) as output:
        written: Written = WRITERS[file.format](output, skeleton, payloads, algorithm=order.algorithm)
    return entry_of(file.name, written)


def entry_of(name: str, written: Written) -> FileEntry:
    """What the manifest says of a file."""
    tensors = tuple(
        TensorEntry(called, each.shape, each.dtype, each.nbytes, each.offset, each.hash or "")
        for called, each in zip(numbered(each.name for each in written.regions), written.regions, strict=True)
    )
    return FileEntry(name, written.size, written.hash, tensors)


def numbered(names: Iterable[str]) -> list[str]:
    """Each name once. Ways through a state can have the same one: {"a/b": x, "a": {"b": y}}, or {0: x, "0": y}."""
    taken: dict[str, None] = {}
    for name in names:
        found, number = name, 1
        while found in taken:
            number += 1
            found = f"{name}@@{number}"
        taken[found] = None
    return list(taken)


def _of(data: memoryview, stretch: Stretch) -> memoryview:
    if not 0 <= stretch.at <= stretch.at + stretch.nbytes <= len(data):
        raise ValueError(f"an order names bytes {stretch.at} to {stretch.at + stretch.nbytes} of {len(data)}")
    return data[stretch.at : stretch.at + stretch.nbytes]
