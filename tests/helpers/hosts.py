"""Several hosts on one machine, and a network between them that can be cut.

with hosts(3, tmp_path) as (a, b, c):
    launched = a.run(["elastic-launch", ...])
    block(a, [b, c])

Each host is a network namespace with a name and a line in /etc/hosts of its own, joined to the others by a bridge. Any
cut is silent: packets vanish, nobody is told. Neighbours are written down beforehand, so that no failing ARP tells
either.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from helpers.launched import Launched

# Run as the command that was asked for: nothing here forks, so its pid is the one that was started.
ENTER = 'echo "$0" >/proc/sys/kernel/hostname && mount --bind "$1" /etc/hosts && shift && exec "$@"'
_networks = itertools.count(1)


class Host:
    """One network namespace, with one end of a cable."""

    def __init__(self, network: Network, number: int) -> None:
        self.number = number
        self.name = f"host{number}"
        self.address = f"10.77.0.{number}"
        self.namespace = f"{network.name}-{number}"
        self.hardware = f"02:00:0a:4d:00:{number:02x}"
        self.port = f"port{number}"
        self._network = network

    @property
    def enter(self) -> list[str]:
        """What stands in front of a command that is to run here."""
        names = self._network.folder / f"{self.namespace}.hosts"
        return [
            *("nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "--mount", "--uts"),
            *("sh", "-c", ENTER, self.name, str(names)),
        ]

    def run(
        self,
        argv: Sequence[object],
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int | None = None,
    ) -> Launched:
        """Start a command here; it is ended with the network."""
        launched = Launched([*self.enter, *map(str, argv)], env or {}, cwd or self._network.folder, stdin)
        self._network.started.append(launched)
        return launched

    def cut(self) -> None:
        """Pull the cable out."""
        self._network.ip("link", "set", self.port, "down")

    def heal(self) -> None:
        self._network.ip("link", "set", self.port, "up")

    def drop_to(self, other: Host) -> None:
        """Let everything vanish that goes from here to the other host."""
        # A redirection to a device that leads nowhere: fewer kernels have the action that drops.
        self._network.tc(
            *("filter", "add", "dev", self.port, "ingress", "pref", other.number, "protocol", "all"),
            *("u32", "match", "ether", "dst", other.hardware, "action", "mirred", "egress", "redirect", "dev", "sink"),
        )

    def pass_to(self, other: Host) -> None:
        self._network.tc("filter", "del", "dev", self.port, "ingress", "pref", other.number)


class Network:
    def __init__(self, size: int, folder: Path) -> None:
        self.name = f"e2e-{os.getpid()}-{next(_networks)}"
        self.folder = folder
        self.started: list[Launched] = []
        self.hosts = [Host(self, number) for number in range(1, size + 1)]

    def ip(self, *words: object) -> None:
        command("ip", "-n", self.name, *words)

    def tc(self, *words: object) -> None:
        command("tc", "-n", self.name, *words)

    def make(self) -> None:
        command("ip", "netns", "add", self.name)
        for bridge in ("bridge", "sink"):
            self.ip("link", "add", bridge, "type", "bridge")
            self.ip("link", "set", bridge, "up")
        names = "".join(f"{host.address} {host.name}\n" for host in self.hosts)
        for host in self.hosts:
            command("ip", "netns", "add", host.namespace)
            end = ("peer", "name", "eth0", "address", host.hardware, "netns", host.namespace)
            self.ip("link", "add", host.port, "type", "veth", *end)
            self.ip("link", "set", host.port, "master", "bridge", "up")
            self.tc("qdisc", "add", "dev", host.port, "clsact")
            command("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                command("ip", "-n", host.namespace, "link", "set", device, "up")
            for other in self.hosts:
                if other is not host:
                    known = (other.address, "lladdr", other.hardware, "dev", "eth0", "nud", "permanent")
                    command("ip", "-n", host.namespace, "neighbour", "add", *known)
            (self.folder / f"{host.namespace}.hosts").write_text(f"127.0.0.1 localhost\n{names}")

    def remove(self) -> None:
        """End all that runs here, and take everything down; one failure does not keep the rest from going."""
        names = (*(host.namespace for host in self.hosts), self.name)
        namespaces = [name for name in names if os.path.exists(f"/run/netns/{name}")]
        with contextlib.ExitStack() as last_first:
            for namespace in namespaces:
                last_first.callback(command, "ip", "netns", "delete", namespace)
            for launched in self.started:
                last_first.callback(launched.destroy)
            for namespace in namespaces:
                last_first.callback(end_processes, namespace)


def command(*words: object) -> str:
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(map(str, words))}: {done.stderr.strip()}")
    return done.stdout


def end_processes(namespace: str) -> None:
    """Kill what still runs there, started by us or not, by pid."""
    end = time.monotonic() + 10
    while pids := command("ip", "netns", "pids", namespace).split():
        if time.monotonic() >= end:
            raise TimeoutError(f"{namespace}: {pids} do not end")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)


@functools.cache
def missing() -> str | None:
    """Why there can be no hosts on this machine."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc", "nsenter", "unshare", "mount"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    network = Network(2, Path("/dev/shm"))
    try:
        network.make()
        network.hosts[0].drop_to(network.hosts[1])
        command(*network.hosts[0].enter, "true")
    except OSError as error:
        return f"this machine can not keep hosts apart: {error}"
    finally:
        network.remove()
        for host in network.hosts:
            (network.folder / f"{host.namespace}.hosts").unlink(missing_ok=True)
    return None


@contextlib.contextmanager
def hosts(size: int, folder: Path) -> Iterator[list[Host]]:
    """That many hosts, host1 to hostN, at 10.77.0.1 to 10.77.0.N. Everything is ended and removed afterwards."""
    if reason := missing():
        pytest.skip(reason)
    network = Network(size, folder)
    try:
        network.make()
        yield network.hosts
    finally:
        network.remove()


def pairs(some: Host | Sequence[Host], others: Host | Sequence[Host]) -> Iterator[tuple[Host, Host]]:
    groups = [[group] if isinstance(group, Host) else group for group in (some, others)]
    for one, other in itertools.product(*groups):
        yield one, other
        yield other, one


def block(some: Host | Sequence[Host], others: Host | Sequence[Host]) -> None:
    """Let all that goes between these hosts, or groups of hosts, vanish, both ways."""
    for one, other in pairs(some, others):
        one.drop_to(other)


def unblock(some: Host | Sequence[Host], others: Host | Sequence[Host]) -> None:
    for one, other in pairs(some, others):
        one.pass_to(other)
