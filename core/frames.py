"""Messages on a stream between the agent and the processes that it starts: a length, then JSON.

Standard library only and importable by path: the guard and the bootstrap use it without the package.
"""

from __future__ import annotations

import os

_HEADER_BYTES = 4


def encode(message: object) -> bytes:
    """One message as bytes."""
    import json

    body = json.dumps(message).encode()
    return len(body).to_bytes(_HEADER_BYTES, "big") + body


class Decoder:
    """Takes bytes as they come and gives the messages that are complete."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> list[dict[str, object]]:
        self._pending += data
        messages = []
        while len(self._pending) >= _HEADER_BYTES:
            end = _HEADER_BYTES + int.from_bytes(self._pending[:_HEADER_BYTES], "big")
            if len(self._pending) < end:
                break
            messages.append(_decode(self._pending[_HEADER_BYTES:end]))
            self._pending = self._pending[end:]
        return messages


def read(fd: int) -> dict[str, object] | None:
    """Wait for one message, reading not a byte more than it has; None at the end of the stream."""
    header = _read_exactly(fd, _HEADER_BYTES)
    if header is None:
        return None
    body = _read_exactly(fd, int.from_bytes(header, "big"))
    return None if body is None else _decode(body)


def write(fd: int, message: object) -> None:
    data = encode(message)
    while data:
        data = data[os.write(fd, data) :]


class _Plain:
    """JSON's values as they are: what the scanner in C asks for."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = None


def _decode(body: bytes) -> dict[str, object]:
    """json.loads by its half in C: importing the other half would take a worker as long as its whole start."""
    message: dict[str, object]
    try:
        from _json import make_scanner

        message, _ = make_scanner(_Plain)(body.decode(), 0)  # type: ignore[arg-type]
    except (ImportError, AttributeError):
        import json

        message = json.loads(body)
    return message


def _read_exactly(fd: int, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        piece = os.read(fd, size - len(data))
        if not piece:
            return None
        data += piece
    return data
