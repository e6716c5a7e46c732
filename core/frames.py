"""Messages on a stream between the agent and the processes that it starts: a length, then JSON.

Standard library only and importable by path: the guard and the bootstrap use it without the package.
"""

from __future__ import annotations

import json
import os
import struct

HEADER = struct.Struct(">I")


def encode(message: object) -> bytes:
    """One message as bytes."""
    body = json.dumps(message).encode()
    return HEADER.pack(len(body)) + body


class Decoder:
    """Takes bytes as they come and gives the messages that are complete."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> list[dict[str, object]]:
        self._pending += data
        messages = []
        while len(self._pending) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._pending)
            end = HEADER.size + size
            if len(self._pending) < end:
                break
            messages.append(json.loads(self._pending[HEADER.size : end]))
            self._pending = self._pending[end:]
        return messages


def read(fd: int) -> dict[str, object] | None:
    """Wait for one message, reading not a byte more than it has; None at the end of the stream."""
    header = _read_exactly(fd, HEADER.size)
    if header is None:
        return None
    body = _read_exactly(fd, HEADER.unpack(header)[0])
    if body is None:
        return None
    message: dict[str, object] = json.loads(body)
    return message


def write(fd: int, message: object) -> None:
    data = encode(message)
    while data:
        data = data[os.write(fd, data) :]


def _read_exactly(fd: int, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        piece = os.read(fd, size - len(data))
        if not piece:
            return None
        data += piece
    return data
