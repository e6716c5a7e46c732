"""Whether somebody listens at an address: refused, open, or no answer at all."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from elastic_adapter.core.model import Endpoint
from elastic_adapter.core.succession import Answer


async def probe(address: str, within_s: float = 1.0) -> Answer:
    """Try to connect to HOST:PORT, and hang up."""
    try:
        place = Endpoint.parse(address)
        _, writer = await asyncio.wait_for(asyncio.open_connection(place.host, place.port), within_s)
    except ConnectionRefusedError:
        return Answer.REFUSED
    except socket.gaierror:
        return Answer.UNKNOWN
    except (OSError, asyncio.TimeoutError, ValueError):
        return Answer.SILENT
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return Answer.OPEN
