"""What a worker asks to be saved: which files are to be made of the bytes in its buffer, and what is known of them.

Pure. It lies in the buffer itself, before the bytes: whoever finds a full buffer can save it, also when nobody is left
to ask.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

# What can be made of a skeleton and bytes.
FORMATS = ("torch", "paddle")


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes of the buffer's data."""

    at: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class FileOrder:
    """One file: its skeleton, packed, and the bytes that belong into it, in order."""

    name: str
    format: str
    skeleton: Stretch
    payloads: tuple[Stretch, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """One rank's part of a checkpoint."""

    root: str
    # The same for all who write this checkpoint.
    token: str
    step: int
    generation: int
    rank: int
    world_size: int
    framework: str
    versions: dict[str, str]
    files: tuple[FileOrder, ...]
    created_at: float
    job: str | None = None
    run: str | None = None
    # Rank 0's are the checkpoint's: the sampler's state, and whatever else is plain JSON.
    facts: dict[str, Any] = field(default_factory=dict)
    algorithm: str = "xxh3_128"

    def __post_init__(self) -> None:
        for file in self.files:
            if file.format not in FORMATS:
                raise ValueError(f"{file.name} is to be of the unknown format {file.format!r}")


def order_to_bytes(order: Order) -> bytes:
    """A worker that trains waits for this: there are thousands of stretches."""
    values = {name: getattr(order, name) for name in Order.__slots__}
    values["files"] = [
        [file.name, file.format, _pair(file.skeleton), [_pair(payload) for payload in file.payloads]]
        for file in order.files
    ]
    return json.dumps(values, separators=(",", ":")).encode()


def order_from_bytes(data: bytes) -> Order:
    values = json.loads(data)
    files = tuple(
        FileOrder(name, format, Stretch(*skeleton), tuple(Stretch(*payload) for payload in payloads))
        for name, format, skeleton, payloads in values["files"]
    )
    return Order(**{**values, "files": files})


def _pair(stretch: Stretch) -> tuple[int, int]:
    return stretch.at, stretch.nbytes
