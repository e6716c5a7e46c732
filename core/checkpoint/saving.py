"""Makes a checkpoint of what workers left in their buffers. Needs no framework, and nobody who asks.

Each rank's part is written into the draft that all ranks share, and a part's own manifest beside it, last. When all
parts are there, any one who knows that can finish the draft.
"""

from __future__ import annotations

import os
from pathlib import Path

from elastic_adapter.core.checkpoint.files import Skeleton, Written
from elastic_adapter.core.checkpoint.manifest import (
    FileEntry,
    Manifest,
    TensorEntry,
    manifest_from_bytes,
    manifest_to_bytes,
)
from elastic_adapter.core.checkpoint.order import FileOrder, Order, Stretch
from elastic_adapter.core.checkpoint.paddlefile import write_paddle
from elastic_adapter.core.checkpoint.store import Draft, Store, merged
from elastic_adapter.core.checkpoint.torchfile import write_torch

_WRITERS = {"torch": write_torch, "paddle": write_paddle}


def write_part(order: Order, data: memoryview) -> Draft:
    """Write one rank's files into the draft of its checkpoint. Raises OSError where the storage does not take them."""
    draft = Store(Path(order.root)).draft(order.step, order.generation, order.token)
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
    with draft.file(_part(order.rank)) as file:
        file.write(manifest_to_bytes(part))
    return draft


def finish(draft: Draft, world_size: int, *, md5: bool = False) -> Path:
    """Make a checkpoint of a draft that all ranks have written their parts of."""
    names = [_part(rank) for rank in range(world_size)]
    parts = [manifest_from_bytes((draft.path / name).read_bytes()) for name in names]
    for name in names:
        os.unlink(draft.path / name)
    return draft.finish(merged(parts), md5=md5)


def missing(draft: Draft, world_size: int) -> tuple[int, ...]:
    """The ranks that have not written their part."""
    return tuple(rank for rank in range(world_size) if not (draft.path / _part(rank)).exists())


def _part(rank: int) -> str:
    return f"part.{rank}.json"


def _write(draft: Draft, order: Order, file: FileOrder, data: memoryview) -> FileEntry:
    skeleton = Skeleton.unpack(_of(data, file.skeleton))
    payloads = [_of(data, payload) for payload in file.payloads]
    with draft.file(file.name) as output:
        written: Written = _WRITERS[file.format](output, skeleton, payloads, algorithm=order.algorithm)
    tensors = tuple(
        TensorEntry(each.name, each.shape, each.dtype, each.nbytes, each.offset, each.hash or "")
        for each in written.regions
    )
    return FileEntry(file.name, written.size, written.hash, tensors)


def _of(data: memoryview, stretch: Stretch) -> memoryview:
    if not 0 <= stretch.at <= stretch.at + stretch.nbytes <= len(data):
        raise ValueError(f"an order names bytes {stretch.at} to {stretch.at + stretch.nbytes} of {len(data)}")
    return data[stretch.at : stretch.at + stretch.nbytes]
