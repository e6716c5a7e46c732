"""How many nodes a job has and where its rank 0 is reached. This version runs one node."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elastic_adapter.core.errors import UserError
from elastic_adapter.launchers.settings import Given

_ONE_NODE = ("static", "c10d")
_SEVERAL_NODES = ("etcd", "etcd-v2", "etcdv3", "embedded")
_LAST_PORT = 65535


@dataclass(frozen=True, slots=True)
class Place:
    """Where rank 0 is reached."""

    address: str
    # None: a free one for each generation.
    port: int | None = None
    notes: tuple[str, ...] = ()


def check(values: Mapping[str, Given]) -> None:
    """Whether the rendezvous that is asked for is one that this version can do."""
    _check_conf(values["rdzv-conf"])
    backend, count = values["rdzv-backend"], values["nnodes"]
    if backend.text in _SEVERAL_NODES and not values["standalone"].on:
        raise UserError(
            f"{backend.where} {backend.text}: this version runs a job on one node, which needs no {backend.text}; "
            "leave it out, or use --standalone"
        )
    if backend.text not in (*_ONE_NODE, *_SEVERAL_NODES):
        raise backend.wrong(f"one of {', '.join((*_ONE_NODE, *_SEVERAL_NODES))}")
    if nodes(count) != (1, 1):
        raise UserError(f"{count.where} {count.text}: this version runs a job on one node; use --nnodes 1")
    if values["node-rank"].whole(0) != 0:
        raise values["node-rank"].wrong("0", "a job on one node has no other node rank")


def nodes(given: Given) -> tuple[int, int]:
    """N or MIN:MAX."""
    parts = (given.text or "").split(":")
    if not re.fullmatch(r"\d+(:\d+)?", given.text or "", re.ASCII):
        raise given.wrong("a number of nodes, or MIN:MAX such as 2:4")
    least, most = int(parts[0]), int(parts[-1])
    if least < 1:
        raise given.wrong("1 node or more")
    if least > most:
        raise given.wrong("MIN:MAX with MIN not above MAX", f"{most}:{least}?")
    return least, most


def _check_conf(given: Given) -> None:
    if not (given.text or "").strip():
        return
    for pair in (given.text or "").split(","):
        key, _, value = pair.partition("=")
        if not key.strip() or not value.strip():
            raise given.wrong("a list such as key=value,key=value")


def place(values: Mapping[str, Given], resolvable: Callable[[str], bool]) -> Place:
    """Only the static backend takes the master's place from the user; with the others torchrun ignores it, too."""
    addr, port, local = values["master-addr"], values["master-port"], values["local-addr"]
    number = port.whole(0, _LAST_PORT) if port.text is not None else 0
    host, endpoint_port = _endpoint(values["rdzv-endpoint"])
    if values["standalone"].on or values["rdzv-backend"].text != "static":
        ignored = ", ".join(given.where for given in (addr, port) if given.explicit)
        note = f"no effect: {ignored}; only --rdzv-backend static without --standalone uses them"
        return Place(_host(local, resolvable), notes=(note,) if ignored else ())
    if host:
        return Place(_resolved(values["rdzv-endpoint"], host, resolvable), endpoint_port or None)
    return Place(_host(addr if addr.explicit else local, resolvable), number or None)


def _host(given: Given, resolvable: Callable[[str], bool]) -> str:
    if given.text is None:
        return "127.0.0.1"
    host = given.text.strip()
    return _resolved(given, host[1:-1] if host[:1] + host[-1:] == "[]" else host, resolvable)


def _resolved(given: Given, host: str, resolvable: Callable[[str], bool]) -> str:
    if not re.fullmatch(r"[\w.:-]+", host) or not resolvable(host):
        raise given.wrong("the name or address of a host that can be resolved")
    return host


def _endpoint(given: Given) -> tuple[str, int]:
    """HOST, HOST:PORT or [IPv6]:PORT; an empty host where none is given."""
    text = (given.text or "").strip()
    if not text:
        return "", 0
    found = re.fullmatch(r"(\[[\w:.]+\]|[\w.-]+)(?::(\d{1,5}))?", text, re.ASCII)
    if found is None or int(found[2] or 0) > _LAST_PORT:
        raise given.wrong("HOST:PORT")
    return found[1].strip("[]"), int(found[2] or 0)
