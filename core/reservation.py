"""Ports kept free for a master: bound here, never listening, so that the master itself can bind them.

Linux lets a second socket bind and listen on such a port when both set SO_REUSEADDR, which the stores of
torch and paddle do. The kernel gives the port to nobody else as long as it is held here.
"""

from __future__ import annotations

import socket
from errno import EADDRNOTAVAIL


class Reservations:
    """The ports that this node offers, and those in use. A port is held until it is released."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._held: dict[int, socket.socket] = {}

    def reserve(self) -> int:
        """Hold one more free port."""
        infos = socket.getaddrinfo(self._address, 0, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = infos[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
        except OSError as error:
            if error.errno != EADDRNOTAVAIL:
                raise
            # An address that leads here by other means (a forwarded or virtual one): hold the port on all of ours.
            sock.bind(("", 0))
        port = int(sock.getsockname()[1])
        self._held[port] = sock
        return port

    def release(self, port: int) -> None:
        sock = self._held.pop(port, None)
        if sock is not None:
            sock.close()

    def close(self) -> None:
        for port in list(self._held):
            self.release(port)
