"""How many nodes a job has and where its rank 0 is reached. This version runs one node."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elastic_adapter.core.errors import UserError
from elastic_adapter.launchers.settings import Given

_ONE_NODE = ("static", "c10d")
_SEVERAL_NODES = ("etcd", "etcd-v2", "etcdv3", "embedded")


@dataclass(frozen=True, slots=True)
class Meeting:
    min_nodes: int
    max_nodes: int
    address: str
    # None: a free one for each generation.
    master_port: int | None
    notes: tuple[str, ...] = ()


def meeting(values: Mapping[str, Given], resolvable: Callable[[str], bool]) -> Meeting:
    least, most = nodes(values["nnodes"])
    _check_conf(values["rdzv-conf"])
    standalone = values["standalone"].on
    backend = values["rdzv-backend"]
    if not standalone:
        _check_backend(backend)
    if most > 1:
        raise UserError(
            f"{values['nnodes'].where} {values['nnodes'].text}: this version runs a job on one node; use --nnodes 1"
        )
    if values["node-rank"].whole(0) != 0:
        raise values["node-rank"].wrong("0", "a job on one node has no other node rank")
    return _at(values, standalone or backend.text != "static", least, most, resolvable)


def nodes(given: Given) -> tuple[int, int]:
    """N or MIN:MAX."""
    parts = (given.text or "").split(":")
    if len(parts) > 2 or not all(part.isascii() and part.isdecimal() for part in parts):
        raise given.wrong("a number of nodes, or MIN:MAX such as 2:4")
    least, most = int(parts[0]), int(parts[-1])
    if least < 1:
        raise given.wrong("1 node or more")
    if least > most:
        raise given.wrong("MIN:MAX with MIN not above MAX", f"{most}:{least}?")
    return least, most


def _check_backend(given: Given) -> None:
    if given.text in _SEVERAL_NODES:
        raise UserError(
            f"{given.where} {given.text}: this version runs a job on one node, which needs no {given.text}; "
            "leave it out, or use --standalone"
        )
    if given.text not in _ONE_NODE:
        raise given.wrong(f"one of {', '.join((*_ONE_NODE, *_SEVERAL_NODES))}")


def _check_conf(given: Given) -> None:
    if not (given.text or "").strip():
        return
    for pair in (given.text or "").split(","):
        key, _, value = pair.partition("=")
        if not key.strip() or not value.strip():
            raise given.wrong("a list such as key=value,key=value")


def _at(
    values: Mapping[str, Given], free_port: bool, least: int, most: int, resolvable: Callable[[str], bool]
) -> Meeting:
    """Only the static backend takes the master's place from the user; torchrun ignores it with the others too."""
    port = values["master-port"].whole(0, 65535) if values["master-port"].text else 0
    host, endpoint_port = _endpoint(values["rdzv-endpoint"])
    address = values["local-addr"]
    notes: tuple[str, ...] = ()
    if free_port:
        ignored = [values[name].where for name in ("master-addr", "master-port") if values[name].explicit]
        if ignored:
            notes = (f"{' and '.join(ignored)} have no effect here: only the static backend uses them",)
        return Meeting(least, most, _host(address, resolvable) or "127.0.0.1", None, notes)
    if host:
        address, port = values["rdzv-endpoint"], endpoint_port
        return Meeting(least, most, _resolved(address, host, resolvable), port or None)
    if values["master-addr"].explicit:
        address = values["master-addr"]
    return Meeting(least, most, _host(address, resolvable) or "127.0.0.1", port or None)


def _host(given: Given, resolvable: Callable[[str], bool]) -> str | None:
    if not given.text:
        return None
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
    if found is None or int(found[2] or 0) > 65535:
        raise given.wrong("HOST:PORT")
    return found[1].strip("[]"), int(found[2] or 0)
