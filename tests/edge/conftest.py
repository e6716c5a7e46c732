"""What the edge tests share: a guard with its processes, and a watch over processes that are not our children."""

import asyncio
import contextlib
import os
import select
import sys
import time
import venv

import pytest

from elastic_adapter.core.processes import BOOTSTRAP, CHANNEL_FD, STACKS_FD, STACKS_SIGNAL, Guard, Spawn

# Far beyond what anything here takes: reached only when a test has failed.
WITHIN_S = 30.0


class Ended:
    """All that a process left behind."""

    def __init__(self, exit, stdout, stderr, messages):
        self.exit = exit
        self.stdout = stdout
        self.stderr = stderr
        self.messages = messages

    @property
    def how(self):
        """The code, or the signal as a negative number, as subprocess says it."""
        return self.exit.code if self.exit.signal is None else -self.exit.signal

    @property
    def errors(self):
        return [message["error"] for message in self.messages if "error" in message]


class Child:
    """A process of the guard with its output and its messages."""

    def __init__(self, process):
        self.process = process
        # Where its bootstrap is told to write its stacks.
        self.stacks = None
        self.messages = []
        self._heard = asyncio.Condition()
        self._hearers = set()
        self._streams = []

    async def open(self):
        self.process.channel.listen(self._hear)
        self._streams = [await _reader(self.process.stdout), await _reader(self.process.stderr)]
        return self

    def _hear(self, message):
        self.messages.append(message)
        task = asyncio.ensure_future(self._tell())
        self._hearers.add(task)
        task.add_done_callback(self._hearers.discard)

    async def _tell(self):
        async with self._heard:
            self._heard.notify_all()

    def send(self, message):
        self.process.channel.send(message)

    async def line(self):
        """The next line of its stdout."""
        return (await asyncio.wait_for(self._streams[0][0].readline(), WITHIN_S)).decode().rstrip("\n")

    async def message(self, key):
        """Wait for a message that has this key."""

        def found():
            return next((message for message in self.messages if key in message), None)

        async with self._heard:
            await asyncio.wait_for(self._heard.wait_for(found), WITHIN_S)
        return found()

    async def exited(self):
        return await asyncio.wait_for(asyncio.shield(self.process.exited), WITHIN_S)

    async def ended(self):
        """Wait for its end and for the end of its output."""
        reads = (asyncio.wait_for(reader.read(), WITHIN_S) for reader, _ in self._streams)
        exit, stdout, stderr = await asyncio.gather(self.exited(), *reads)
        self.process.channel.drain()
        return Ended(exit, stdout.decode(errors="backslashreplace"), stderr.decode(), self.messages)

    def close(self):
        self.process.channel.close()
        for _, transport in self._streams:
            transport.close()


async def _reader(fd):
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0)
    )
    return reader, transport


class Ward:
    """A guard and the processes that it started for a test; everything ends with the block."""

    def __init__(self, folder, stdin, interpreter):
        self.folder = folder
        self._stdin = stdin
        self._interpreter = interpreter
        self.guard = None
        self._children = []

    async def __aenter__(self):
        with _stdin_from(self._stdin):
            self.guard = Guard.start(str(self.folder))
        self.guard.listen()
        return self

    async def __aexit__(self, *_):
        for child in self._children:
            child.close()
        await asyncio.wait_for(self.guard.close(), WITHIN_S)

    async def start(self, *argv, **options):
        spawn = Spawn(argv, options.pop("set", {}), **options)
        child = Child(await asyncio.wait_for(self.guard.spawn(spawn), WITHIN_S))
        self._children.append(child)
        return await child.open()

    async def run(self, *argv, **options):
        return await (await self.start(*argv, **options)).ended()

    async def python(self, code, **options):
        """Start a small Python program that needs the standard library only."""
        return await self.start(sys.executable, "-E", "-s", "-S", "-u", "-c", code, **options)

    async def cold(self, program, *args, **options):
        """Run a program through the bootstrap, as a worker that is started directly."""
        child = await self._bootstrap(**options)
        child.send({"program": program, "stacks": self._stacks(child), "start": {"args": args}})
        return child

    async def standby(self, program, *preload, **options):
        """Start a standby; ``message("ready")`` waits until it has imported."""
        child = await self._bootstrap(**options)
        child.send({"program": program, "stacks": self._stacks(child), "preload": preload})
        return child

    def wake(self, child, *args, **variables):
        child.send({"start": {"args": args, "set": variables, "unset": []}})

    def _stacks(self, child):
        child.stacks = str(self.folder / f"stacks.{child.process.id}")
        return {"signal": STACKS_SIGNAL, "path": child.stacks, "fd": STACKS_FD}

    async def _bootstrap(self, **options):
        return await self.start(*self.bootstrap_argv, **options)

    @property
    def bootstrap_argv(self):
        return self._interpreter, "-u", BOOTSTRAP, str(CHANNEL_FD)


@contextlib.contextmanager
def _stdin_from(path):
    """For a moment, this process's own stdin: what it starts inherits it."""
    if path is None:
        yield
        return
    kept = os.dup(0)
    fd = os.open(path, os.O_RDONLY)
    try:
        os.dup2(fd, 0)
        yield
    finally:
        os.dup2(kept, 0)
        os.close(kept)
        os.close(fd)


class Watch:
    """The ends of processes, whoever their parent is."""

    def __init__(self, pids):
        self._pidfds = {pid: os.pidfd_open(pid) for pid in pids}

    def alive(self):
        poll = select.poll()
        for fd in self._pidfds.values():
            poll.register(fd, select.POLLIN)
        ended = {fd for fd, _ in poll.poll(0)}
        return {pid for pid, fd in self._pidfds.items() if fd not in ended}

    def wait(self):
        """Wait for all ends; the processes that are alive after a long while."""
        until = time.monotonic() + WITHIN_S
        for fd in self._pidfds.values():
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            poll.poll(max(0.0, until - time.monotonic()) * 1000)
        return self.alive()

    def close(self):
        for fd in self._pidfds.values():
            os.close(fd)


@pytest.fixture
def guarded(tmp_path_factory):
    """Makes a guard: ``async with guarded() as ward``."""

    def make(stdin=None, interpreter=sys.executable):
        return Ward(tmp_path_factory.mktemp("scratch"), stdin, interpreter)

    return make


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory):
    """An interpreter without any packages: it starts in a third of the time."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    return str(folder / "bin" / "python")


@pytest.fixture
def watch():
    """Makes a watch over pids; what is still alive when the test is over is killed."""
    watches = []

    def make(*pids):
        watches.append(Watch(pids))
        return watches[-1]

    yield make
    for each in watches:
        for pid in each.alive():
            os.kill(pid, 9)
        each.close()


@pytest.fixture
def no_entry(monkeypatch):
    """``no_entry(folder)``: it can be listed, but what is in it can't be looked at, as without the right to search it."""

    def close(folder):
        begin = f"{folder}{os.sep}"

        def closed(function):
            def call(path, *args, **options):
                if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(begin):
                    raise PermissionError(13, "Permission denied", os.fspath(path))
                return function(path, *args, **options)

            return call

        for name in ("stat", "lstat", "open", "scandir"):
            monkeypatch.setattr(os, name, closed(getattr(os, name)))

    return close
