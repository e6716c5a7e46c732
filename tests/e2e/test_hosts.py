"""The hosts that other tests cut apart are what they seem."""

import os
import signal
import subprocess
import sys
import time

import pytest

from helpers.etcd_servers import binary, cluster
from helpers.hosts import block, hosts, unblock
from helpers.launched import PATIENCE_S

# Says back each line that it gets, and which.
ECHO = """
import socket, threading
server = socket.create_server(("", 0))
address = socket.gethostbyname(socket.gethostname())
print("listening on", socket.gethostname(), "at", address, server.getsockname()[1], flush=True)
def serve(connection):
    for line in connection.makefile():
        print("got", line.strip(), flush=True)
        connection.sendall(line.encode())
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""
# One connection that is kept: says each answer, and each error of its own or of a new connection.
TALK = """
import os, socket, sys, threading, time
def tell(*words):
    # One write per line: there are two threads.
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def listen():
    for line in old.makefile():
        tell("answered", line.strip())
    tell("ended")
there = (sys.argv[1], int(sys.argv[2]))
old = socket.create_connection(there, 5)
old.settimeout(None)
threading.Thread(target=listen, daemon=True).start()
for number, _ in enumerate(sys.stdin):
    old.sendall(f"{number}\\n".encode())
    begin = time.monotonic()
    try:
        socket.create_connection(there, 2).close()
        tell(f"new {number} connected")
    except OSError as error:
        tell(f"new {number} failed: {type(error).__name__} after {time.monotonic() - begin:.1f} s")
"""


class Talk:
    """A connection from one host to another that lives through cuts."""

    def __init__(self, here, there):
        self._server = there.run([sys.executable, "-c", ECHO])
        port = self._server.seen(rf"listening on {there.name} at {there.address} (\d+)")[1]
        # Its input comes through a pipe of ours.
        end, self._input = os.pipe()
        self._talk = here.run([sys.executable, "-c", TALK, there.address, port], stdin=end)
        os.close(end)
        self._said = 0

    def say(self):
        os.write(self._input, b"\n")
        self._said += 1
        return self._said - 1

    def works(self):
        number = self.say()
        self._talk.seen(rf"answered {number}$")
        self._talk.seen(rf"new {number} connected")

    def is_silent(self):
        number = self.say()
        # Neither refused nor unreachable: as long as it had patience.
        self._talk.seen(rf"new {number} failed: TimeoutError after 2\.\d s")
        assert f"answered {number}" not in self._talk.text
        assert f"got {number}" not in self._server.text
        assert "ended" not in self._talk.text
        return number

    def comes_through(self, number):
        """What was sent in the silence arrives on the old connection, and its answer too."""
        self._server.seen(rf"got {number}$")
        self._talk.seen(rf"answered {number}$")

    def close(self):
        os.close(self._input)


@pytest.fixture
def three(tmp_path):
    with hosts(3, tmp_path) as network:
        yield network


def left_of(pid):
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [name for name in names.split() if name.startswith(f"e2e-{pid}-")]


def test_block(three):
    """Between blocked hosts connections fall silent, both ways, and go on afterwards; others are not touched."""
    a, b, c = three
    forth, back, aside = Talk(a, b), Talk(b, a), Talk(c, b)
    for talk in (forth, back, aside):
        talk.works()
    block(a, [b])
    lost = [(talk, talk.is_silent()) for talk in (forth, back)]
    aside.works()
    unblock(a, [b])
    for talk, number in lost:
        talk.comes_through(number)
        talk.works()
        talk.close()
    aside.close()


def test_cut(three):
    """A host without its cable hears nobody; with it, connections go on."""
    a, b, c = three
    talk, aside = Talk(a, b), Talk(c, b)
    talk.works()
    a.cut()
    lost = talk.is_silent()
    aside.works()
    a.heal()
    talk.comes_through(lost)
    talk.works()
    talk.close()
    aside.close()


def test_loopback_goes_on_without_the_cable(three):
    a, *_ = three
    a.cut()
    program = f"import socket; s = socket.create_server(('', 0)); socket.create_connection(({a.address!r}, s.getsockname()[1]), 5)"
    assert a.run([sys.executable, "-c", program]).finish() == 0


def test_nothing_is_left(tmp_path):
    """Namespaces and processes go, also those that nobody knows of, also after a failure."""
    started = {}

    def fail():
        with hosts(2, tmp_path) as (a, b):
            block(a, b)
            started["known"] = a.run(["sleep", "600"])
            started["hidden"] = b.run(["sh", "-c", "echo started; exec env -i sleep 600"])
            started["hidden"].seen("started")
            assert len(left_of(os.getpid())) == 3
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert left_of(os.getpid()) == []
    for launched in started.values():
        assert launched.process.poll() == -signal.SIGKILL


def test_etcd_across_hosts(three, tmp_path):
    """A cluster with a member on each host: the side with most members goes on, the other one does not answer."""

    def put(host):
        flags = ("--endpoints", f"{host.address}:2379", "--command-timeout", "3s", "--dial-timeout", "3s")
        return host.run([binary("etcdctl"), *flags, "put", "key", host.name]).finish()

    with cluster(tmp_path, 3, hosts=three) as servers:
        assert [server.endpoint for server in servers] == [f"10.77.0.{n}:2379" for n in (1, 2, 3)]
        for host in three:
            assert put(host) == 0
        a, *others = three
        block(a, others)
        assert put(a) != 0
        end = time.monotonic() + PATIENCE_S
        while put(others[0]) != 0:
            assert time.monotonic() < end
        unblock(a, others)
        servers[0].healthy()
        assert put(a) == 0
