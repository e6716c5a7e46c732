"""Real etcd servers: on loopback, or each on a host of its own."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from helpers.ports import free_ports

if TYPE_CHECKING:
    from helpers.hosts import Host

# Run where the server is: other network namespaces do not reach it.
UNTIL_HEALTHY = """
import http.client, sys, time
end = time.monotonic() + 20
while True:
    try:
        connection = http.client.HTTPConnection(sys.argv[1], timeout=2)
        connection.request("GET", "/health")
        if b'"true"' in connection.getresponse().read():
            break
    except OSError:
        pass
    if time.monotonic() >= end:
        sys.exit(f"etcd at {sys.argv[1]} is not healthy after 20 s")
    time.sleep(0.02)
"""


def binary(name):
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


class Server:
    """One member of an etcd cluster, on loopback or on a host."""

    def __init__(self, folder, name, client, peer, cluster, *flags, host: Host | None = None):
        self.name, self.port = name, client
        self.address = host.address if host else "127.0.0.1"
        self._enter = host.enter if host else []
        self._argv = [
            *(*self._enter, binary("etcd"), "--name", name, "--data-dir", str(folder / name), "--log-level", "error"),
            *("--listen-client-urls", f"http://{self.address}:{client}"),
            *("--advertise-client-urls", f"http://{self.address}:{client}"),
            *("--listen-peer-urls", f"http://{self.address}:{peer}"),
            *("--initial-advertise-peer-urls", f"http://{self.address}:{peer}"),
            *("--initial-cluster", cluster, *flags),
        ]
        self._log = (folder / f"{name}.log").open("ab")
        self.process = None

    def start(self):
        self.process = subprocess.Popen(self._argv, stdout=self._log, stderr=self._log)

    def healthy(self):
        """Wait until it answers."""
        argv = [*self._enter, sys.executable, "-c", UNTIL_HEALTHY, self.endpoint]
        subprocess.run(argv, check=True, timeout=30)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def close(self):
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()
        self._log.close()

    @property
    def endpoint(self):
        return f"{self.address}:{self.port}"


@contextlib.contextmanager
def cluster(folder, size, *flags, hosts: Sequence[Host] | None = None) -> Iterator[list[Server]]:
    """That many members on loopback ports, or on the first of these hosts."""
    ports = [2379, 2380] * size if hosts else free_ports(2 * size)
    places = list(hosts[:size]) if hosts else [None] * size
    members = ",".join(
        f"m{n}=http://{place.address if place else '127.0.0.1'}:{ports[2 * n + 1]}" for n, place in enumerate(places)
    )
    servers = [
        Server(folder, f"m{n}", ports[2 * n], ports[2 * n + 1], members, *flags, host=place)
        for n, place in enumerate(places)
    ]
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.healthy()
        yield servers
    finally:
        for server in servers:
            server.close()


def _until_open(port):
    end = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            if time.monotonic() >= end:
                raise
            time.sleep(0.02)
        else:
            return


def openssl(folder, *words):
    subprocess.run([binary("openssl"), *words], check=True, capture_output=True, cwd=folder, timeout=20)


@contextlib.contextmanager
def secured(folder, *flags) -> Iterator[tuple[str, dict[str, str]]]:
    """One that speaks TLS alone and wants a certificate: where, and the files that let one in."""
    (folder / "ext").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    sign = "x509 -req -in req.pem -CA ca.pem -CAkey ca.key -CAcreateserial -out cert.pem -days 2 -extfile ext"
    for words in (
        "req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 2 -subj /CN=ca",
        "req -newkey rsa:2048 -nodes -keyout key.pem -out req.pem -subj /CN=etcd",
        sign,
    ):
        openssl(folder, *words.split())
    client, peer = free_ports(2)
    process = subprocess.Popen(
        [
            *(binary("etcd"), "--data-dir", str(folder / "data"), "--log-level", "error"),
            *("--listen-client-urls", f"https://127.0.0.1:{client}"),
            *("--advertise-client-urls", f"https://127.0.0.1:{client}"),
            *("--listen-peer-urls", f"http://127.0.0.1:{peer}", "--client-cert-auth"),
            *("--trusted-ca-file", "ca.pem", "--cert-file", "cert.pem", "--key-file", "key.pem", *flags),
        ],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _until_open(client)
        yield f"127.0.0.1:{client}", {name: str(folder / f"{name}.pem") for name in ("ca", "cert", "key")}
    finally:
        process.kill()
        process.wait()
