"""Ports that are held for a master, with real sockets."""

import contextlib
import errno
import socket
from datetime import timedelta

import pytest

from elastic_adapter.core.reservation import Reservations


@pytest.fixture
def reservations():
    reservations = Reservations("127.0.0.1")
    yield reservations
    reservations.close()


def listener(family, address, *, reuse=True, dual=False):
    """A listening socket as a store makes it."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if reuse:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if dual:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
        sock.listen()
    except OSError:
        sock.close()
        raise
    return sock


def has_ipv6():
    with contextlib.suppress(OSError), listener(socket.AF_INET6, ("::1", 0)):
        return True
    return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")


def test_ports_are_distinct(reservations):
    """No port is offered twice while it is held, not even by another agent on the same host."""
    others = Reservations("127.0.0.1")
    try:
        ports = [each.reserve() for _ in range(200) for each in (reservations, others)]
    finally:
        others.close()
    assert len(set(ports)) == 400


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_master_can_listen_on_a_reserved_port(reservations, host):
    """A socket with SO_REUSEADDR listens on the port while it is held, and clients reach it."""
    port = reservations.reserve()
    with listener(socket.AF_INET, (host, port)) as server, socket.create_connection(("127.0.0.1", port), 10) as client:
        accepted, _ = server.accept()
        with accepted:
            client.sendall(b"x")
            assert accepted.recv(1) == b"x"


@needs_ipv6
def test_master_can_listen_on_both_protocols(reservations):
    """A dual-stack socket on [::], as torch's store opens it, listens on the port that is held for IPv4."""
    port = reservations.reserve()
    with (
        listener(socket.AF_INET6, ("::", port), dual=True) as server,
        socket.create_connection(("127.0.0.1", port), 10),
    ):
        server.accept()[0].close()


@needs_ipv6
def test_reservation_for_an_ipv6_address():
    """A node that is known by an IPv6 address reserves there."""
    reservations = Reservations("::1")
    try:
        port = reservations.reserve()
        with listener(socket.AF_INET6, ("::", port), dual=True) as server, socket.create_connection(("::1", port), 10):
            server.accept()[0].close()
    finally:
        reservations.close()


def test_reservation_by_name():
    """A node that is known by a name reserves where the name leads."""
    reservations = Reservations("localhost")
    try:
        assert reservations.reserve() > 0
    finally:
        reservations.close()


def test_torch_store_binds_a_reserved_port(reservations):
    """torch's TCPStore, the real one, is its own master on a port that is held, one generation after the other."""
    distributed = pytest.importorskip("torch.distributed")
    for generation in range(2):
        port = reservations.reserve()
        store = distributed.TCPStore("127.0.0.1", port, 1, is_master=True, timeout=timedelta(seconds=20))
        store.set("generation", str(generation))
        client = distributed.TCPStore("127.0.0.1", port, 1, is_master=False, timeout=timedelta(seconds=20))
        assert client.get("generation") == str(generation).encode()
        del client, store
        reservations.release(port)


def test_held_port_is_given_to_nobody_else(reservations):
    """As long as it is held, neither a plain bind nor one of the kernel's own choice gets the port."""
    port = reservations.reserve()
    with pytest.raises(OSError, match="in use") as caught:
        listener(socket.AF_INET, ("127.0.0.1", port), reuse=False)
    assert caught.value.errno == errno.EADDRINUSE
    with contextlib.ExitStack() as stack:
        chosen = [stack.enter_context(listener(socket.AF_INET, ("127.0.0.1", 0))) for _ in range(200)]
        assert port not in {sock.getsockname()[1] for sock in chosen}


@pytest.mark.parametrize("how", ["released", "closed"])
def test_released_port_is_free(reservations, how):
    """A port that is released, by itself or with all others, can be bound by anybody; a second release is no error."""
    port = reservations.reserve()
    if how == "released":
        reservations.release(port)
        reservations.release(port)
    else:
        reservations.close()
    listener(socket.AF_INET, ("127.0.0.1", port), reuse=False).close()
