"""Where the nodes of a job meet: nowhere (one node), at an etcd, or at an etcd that one of them runs.

Names of other nodes need not be known yet when a node starts: only what concerns this node itself is looked up.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from elastic_adapter.core.config import ClusterConfig, Credentials
from elastic_adapter.core.errors import UserError
from elastic_adapter.core.model import Endpoint
from elastic_adapter.launchers.devices import Machine
from elastic_adapter.launchers.settings import Given

_ETCD = ("etcd", "etcd-v2", "etcdv3")
_BACKENDS = ("static", "c10d", *_ETCD, "embedded")
_LAST_PORT = 65535
_ETCD_PORT = 2379
# torchrun's own: of c10d and of the classic master.
_C10D_PORT = 29400
_STATIC_PORT = 29500

# Keys of torchrun's --rdzv-conf that stand for a setting of ours.
_STANDS_FOR = {
    "last_call_timeout": "quiet-time",
    **dict.fromkeys(("cacert", "ca_cert"), "etcd-ca"),
    **dict.fromkeys(("cert", "ssl_cert"), "etcd-cert"),
    **dict.fromkeys(("key", "ssl_cert_key"), "etcd-key"),
}
_USED = frozenset({"is_host", "protocol"})
_WITHOUT_EFFECT = frozenset(
    {
        *("join_timeout", "timeout", "close_timeout", "read_timeout", "keep_alive_interval", "keep_alive_max_attempt"),
        *("heartbeat_timeout", "store_type", "use_agent_store", "etcd_prefix"),
    }
)
# How long the other nodes wait for the one that runs the job's etcd, which may be scheduled later than they are.
_HOST_S = 60.0
_TRUE, _FALSE = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")


@dataclass(frozen=True, slots=True)
class Place:
    """Where this node is reached and how it meets the others."""

    address: str
    # Where the address came from.
    origin: str = "default"
    # The master's port; None: a free one for each generation.
    port: int | None = None
    # The place among the nodes that the user gave this one.
    rank: int | None = None
    # None: there are no others.
    cluster: ClusterConfig | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Spot:
    host: str
    # None: not given.
    port: int | None

    def at(self, default: int) -> str:
        return str(Endpoint(self.host, self.port or default))


def meet(values: Mapping[str, Given], environ: Mapping[str, str], machine: Machine) -> Place:
    """What the settings of the rendezvous come to on this node."""
    backend, count, alone = values["rdzv-backend"], values["nnodes"], values["standalone"]
    if backend.text not in _BACKENDS:
        raise backend.wrong(f"one of {', '.join(_BACKENDS)}")
    _check_times(values)
    _, most = nodes(count)
    if alone.on and most > 1:
        raise UserError(f"{alone.where} contradicts {count.where} {count.text}: leave out one of them")
    if alone.on or (most == 1 and backend.text in ("static", "c10d")):
        return _one_node(values, machine.resolvable)
    if backend.text in _ETCD:
        return _at_etcd(values, environ, machine)
    if backend.text == "static":
        return _at_master(values, environ, machine)
    return _at_host(values, environ, machine)


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


def with_conf(values: Mapping[str, Given]) -> dict[str, Given]:
    """The settings, with those that --rdzv-conf tells in torchrun's words; a flag or variable of their own wins."""
    given = values["rdzv-conf"]
    made = dict(values)
    for key, value in _conf(given).items():
        name = _STANDS_FOR.get(key)
        if name is not None and not values[name].explicit:
            made[name] = Given(name, value, given.origin)
    return made


def _conf(given: Given) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for pair in (given.text or "").split(",") if (given.text or "").strip() else ():
        key, _, value = pair.partition("=")
        if not key.strip() or not value.strip():
            raise given.wrong("a list such as key=value,key=value")
        pairs[key.strip()] = value.strip()
    return pairs


def _conf_notes(values: Mapping[str, Given]) -> list[str]:
    given = values["rdzv-conf"]
    keys = _conf(given)
    overruled = {key for key in keys if key in _STANDS_FOR and values[_STANDS_FOR[key]].origin != given.origin}
    idle = [key for key in keys if key in _WITHOUT_EFFECT | overruled]
    unknown = [key for key in keys if key not in _WITHOUT_EFFECT | _USED | _STANDS_FOR.keys()]
    notes = [f"no effect in {given.where}: {', '.join(idle)}"] if idle else []
    return notes + ([f"not used: {', '.join(unknown)} in {given.where}"] if unknown else [])


def _one_node(values: Mapping[str, Given], resolvable: Callable[[str], bool]) -> Place:
    """Only the static backend takes the master's place from the user; with the others torchrun ignores it, too."""
    if values["node-rank"].whole(0) != 0:
        raise values["node-rank"].wrong("0", "a job on one node has no other node rank")
    addr, port, local = values["master-addr"], values["master-port"], values["local-addr"]
    number = port.whole(0, _LAST_PORT) if port.text is not None else 0
    spot = None if values["standalone"].on else _spot(values["rdzv-endpoint"])
    if values["standalone"].on or values["rdzv-backend"].text != "static":
        return Place(_host(local, resolvable), notes=_ignored(addr, port))
    if spot is not None:
        return Place(_resolved(values["rdzv-endpoint"], spot.host, resolvable), port=spot.port or None)
    return Place(_host(addr if addr.explicit else local, resolvable), port=number or None)


def _ignored(*settings: Given) -> tuple[str, ...]:
    names = ", ".join(given.where for given in settings if given.explicit)
    return (f"no effect: {names}; only --rdzv-backend static without --standalone uses them",) if names else ()


def etcd_of(values: Mapping[str, Given], machine: Machine) -> ClusterConfig:
    """How to reach an etcd that is there already."""
    spots, scheme = _etcd_spots(values)
    return ClusterConfig(
        endpoints=tuple(spot.at(_ETCD_PORT) for spot in spots),
        named_by=values["rdzv-endpoint"].where,
        credentials=_credentials(values, scheme, machine.roots),
    )


def _at_etcd(values: Mapping[str, Given], environ: Mapping[str, str], machine: Machine) -> Place:
    """An etcd that is there already."""
    backend = values["rdzv-backend"]
    cluster = etcd_of(values, machine)
    _check_id(values)
    v3 = f"{backend.where} {backend.text} means etcd's v3 API here: no --enable-v2 is needed"
    notes = () if backend.text == "etcdv3" else (v3,)
    address, origin = _address(values, environ, machine, cluster.endpoints)
    return _place(
        values, machine, Place(address, origin, cluster=cluster, notes=(*notes, *_ignored(*_classic(values))))
    )


def _at_host(values: Mapping[str, Given], environ: Mapping[str, str], machine: Machine) -> Place:
    """An etcd that the node with the endpoint's address runs: ``embedded``, and c10d in torchrun's words."""
    endpoint, backend = values["rdzv-endpoint"], values["rdzv-backend"]
    spot = _spot(endpoint)
    if spot is None:
        raise UserError(
            f"{backend.where} {backend.text}: nodes need a place to meet; add --rdzv-endpoint HOST:PORT with the "
            "address of one of them, the same on all"
        )
    _check_port(endpoint, spot)
    _check_id(values)
    here = _is_host(values["rdzv-conf"])
    return _embedded(
        values,
        environ,
        machine,
        spot,
        _C10D_PORT,
        here=machine.local(spot.host) if here is None else here,
        named_by=endpoint.where,
        notes=_ignored(*_classic(values)),
    )


def _at_master(values: Mapping[str, Given], environ: Mapping[str, str], machine: Machine) -> Place:
    """The classic way of torchrun: the node of rank 0 runs the etcd at the master's address."""
    count = values["nnodes"]
    least, most = nodes(count)
    if least != most:
        raise UserError(
            f"{count.where} {count.text}: --rdzv-backend static needs a fixed number of nodes; "
            "use --rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-id NAME where it may vary"
        )
    rank = values["node-rank"].whole(0, most - 1)
    port = values["master-port"]
    number = port.whole(0, _LAST_PORT) if port.text is not None else None
    spot, named_by = _spot(values["rdzv-endpoint"]), values["rdzv-endpoint"].where
    if spot is not None:
        _check_port(values["rdzv-endpoint"], spot)
    else:
        named_by = values["master-addr"].where
        spot = Spot(_host(values["master-addr"], lambda _: True), number)
        _check_port(port, spot)
    met = f"nodes meet in an etcd at {spot.at(_STATIC_PORT)}; each generation gets a fresh master port"
    here = _is_host(values["rdzv-conf"])
    return _embedded(
        values,
        environ,
        machine,
        spot,
        _STATIC_PORT,
        here=rank == 0 if here is None else here,
        rank=rank,
        named_by=named_by,
        notes=(f"--rdzv-backend static: {met}",),
    )


def _embedded(
    values: Mapping[str, Given],
    environ: Mapping[str, str],
    machine: Machine,
    spot: Spot,
    default_port: int,
    *,
    here: bool,
    rank: int | None = None,
    named_by: str,
    notes: tuple[str, ...],
) -> Place:
    cluster = ClusterConfig(endpoints=(spot.at(default_port),), named_by=named_by, embedded=True, hosts_etcd=here)
    if here and values["local-addr"].text is None:
        address, origin = spot.host, "default, the endpoint's host"
    else:
        address, origin = _address(values, environ, machine, cluster.endpoints)
    asked = [values[name] for name in ("etcd-ca", "etcd-cert", "etcd-key", "etcd-user", "etcd-password")]
    unused = ", ".join(dict.fromkeys(given.where for given in asked if given.explicit))
    return _place(
        values,
        machine,
        Place(
            address,
            origin,
            rank=rank,
            cluster=cluster,
            notes=(
                *notes,
                f"the job's etcd runs on {spot.host}: the job survives the loss of any node but that one",
                *((f"no effect: {unused}; the job's own etcd asks for no credentials",) if unused else ()),
            ),
        ),
    )


def _place(values: Mapping[str, Given], machine: Machine, place: Place) -> Place:
    """Add what all clusters have."""
    assert place.cluster is not None
    listen = values["listen-address"]
    connect = values["connect-timeout"]
    cluster = replace(
        place.cluster,
        connect_s=_HOST_S if place.cluster.awaits_host and not connect.explicit else connect.seconds(positive=True),
        listen=place.address if listen.text is None else _host(listen, machine.resolvable),
        finished_grace_s=values["finished-grace"].seconds(),
        retention_s=values["retention"].seconds(),
    )
    return replace(place, cluster=cluster, notes=(*place.notes, *_conf_notes(values)))


def _check_times(values: Mapping[str, Given]) -> None:
    values["connect-timeout"].seconds(positive=True)
    grace, retention = values["finished-grace"], values["retention"]
    if retention.seconds() < grace.seconds():
        raise retention.wrong(
            f"{grace.seconds():g} seconds or more", f"{grace.where} can't outlast what is kept of a run"
        )


def _classic(values: Mapping[str, Given]) -> tuple[Given, ...]:
    return values["master-addr"], values["master-port"], values["node-rank"]


def _check_id(values: Mapping[str, Given]) -> None:
    if not (values["rdzv-id"].text or "").strip():
        raise UserError(
            "--rdzv-id NAME is missing: the nodes of a job find each other by its name; give the same one on all"
        )


def _check_port(given: Given, spot: Spot) -> None:
    if spot.port == 0:
        raise UserError(
            f"{given.where} {given.text}: other nodes can't find port 0, which is a different one at each start; "
            "give a port, the same on all nodes"
        )


def _is_host(given: Given) -> bool | None:
    text = _conf(given).get("is_host")
    if text is None:
        return None
    if text.lower() not in (*_TRUE, *_FALSE):
        raise given.wrong("is_host=true or is_host=false")
    return text.lower() in _TRUE


def _address(
    values: Mapping[str, Given],
    environ: Mapping[str, str],
    machine: Machine,
    endpoints: tuple[str, ...],
) -> tuple[str, str]:
    """The address by which other nodes reach this one, and where it came from."""
    local = values["local-addr"]
    if local.text is not None:
        return _host(local, machine.resolvable), local.origin
    pod = Given("local-addr", environ.get("POD_IP") or None, "variable POD_IP")
    if pod.text is not None:
        return _host(pod, machine.resolvable), pod.origin
    places = [Endpoint.parse(endpoint) for endpoint in endpoints]
    for place in places:
        found = machine.address_towards(place.host, place.port)
        if found is not None:
            return found, f"default, the way to {place.host}"
    raise UserError(
        "by which address other nodes reach this one can't be told, because "
        f"{' and '.join(place.host for place in places)} {'is' if len(places) == 1 else 'are'} unknown or out of "
        "reach here: check that, or add --local-addr HOST"
    )


def _credentials(values: Mapping[str, Given], scheme: str | None, roots: Callable[[], str | None]) -> Credentials:
    user, password = values["etcd-user"], values["etcd-password"]
    if user.text is not None and password.text is None:
        raise UserError(f"{user.where} {user.text}: its password is missing; set the variable ELASTIC_ETCD_PASSWORD")
    if password.text is not None and user.text is None:
        raise UserError("ELASTIC_ETCD_PASSWORD is set, but no user: add --etcd-user NAME, or unset it")
    ca, cert, key = (values[name] for name in ("etcd-ca", "etcd-cert", "etcd-key"))
    if (cert.text is None) != (key.text is None):
        given, missing = (cert, key) if key.text is None else (key, cert)
        raise UserError(f"{given.where} {given.text}: --{missing.name} is missing; they belong together")
    named = next((given for given in (ca, cert) if given.text is not None), None)
    if scheme == "http" and named is not None:
        raise UserError(
            f"{named.where} {named.text} contradicts http://: write https:// in {values['rdzv-endpoint'].where}"
        )
    authority = _file(ca)
    if authority is None and (scheme == "https" or cert.text is not None):
        authority = roots()
        if authority is None:
            raise UserError("https needs to know whom to trust, and this system has no list: add --etcd-ca PATH")
    return Credentials(user.text, password.text, authority, _file(cert), _file(key))


def _file(given: Given) -> str | None:
    if given.text is None:
        return None
    if not os.path.isfile(given.text):
        raise given.wrong("a file that can be read", "there is none")
    try:
        with open(given.text, "rb"):
            return given.text
    except OSError as error:
        raise given.wrong("a file that can be read", error.strerror or str(error)) from error


def _etcd_spots(values: Mapping[str, Given]) -> tuple[tuple[Spot, ...], str | None]:
    """The endpoints, and http or https where the user says which."""
    given, backend = values["rdzv-endpoint"], values["rdzv-backend"]
    if "@" in (given.text or ""):
        raise UserError(
            f"{given.where}: expected HOST:PORT without a user; give it by --etcd-user and ELASTIC_ETCD_PASSWORD"
        )
    items = given.items()
    if not items:
        raise UserError(
            f"{backend.where} {backend.text}: where is etcd? add --rdzv-endpoint HOST:PORT, or use "
            "--rdzv-backend embedded with the address of one of the nodes"
        )
    spots: list[Spot] = []
    schemes: set[str] = set()
    for item in items:
        scheme, mark, rest = item.rpartition("://")
        if mark and scheme not in ("http", "https"):
            raise given.wrong("HOST:PORT, http://HOST:PORT or https://HOST:PORT")
        schemes |= {scheme} if mark else set()
        spot = parsed(rest.rstrip("/") if mark else item)
        if spot is None or spot.port == 0:
            raise given.wrong("a list of HOST:PORT, each port from 1 to 65535")
        spots.append(spot)
    if not schemes:
        schemes = {text for key, text in _conf(values["rdzv-conf"]).items() if key == "protocol"}
        if not schemes <= {"http", "https"}:
            raise values["rdzv-conf"].wrong("protocol=http or protocol=https")
    if len(schemes) > 1:
        raise given.wrong("http:// or https:// in front of all of them, not both")
    return tuple(spots), next(iter(schemes), None)


def _spot(given: Given) -> Spot | None:
    """The only endpoint; None where none is given."""
    text = (given.text or "").strip()
    if not text:
        return None
    spot = parsed(text)
    if spot is None:
        raise given.wrong("HOST:PORT")
    return spot


def parsed(text: str) -> Spot | None:
    """HOST, HOST:PORT or [IPv6]:PORT."""
    found = re.fullmatch(r"(\[[\w:.]+\]|[\w.-]+)(?::(\d{1,5}))?", text, re.ASCII)
    if found is None or int(found[2] or 0) > _LAST_PORT:
        return None
    return Spot(found[1].strip("[]"), None if found[2] is None else int(found[2]))


def _host(given: Given, resolvable: Callable[[str], bool]) -> str:
    if given.text is None:
        return "127.0.0.1"
    host = given.text.strip()
    return _resolved(given, host[1:-1] if host[:1] + host[-1:] == "[]" else host, resolvable)


def _resolved(given: Given, host: str, resolvable: Callable[[str], bool]) -> str:
    if not re.fullmatch(r"[\w.:-]+", host) or not resolvable(host):
        raise given.wrong("the name or address of a host that can be resolved")
    return host
