"""What a worker hears from its agent over the socket of notices."""

import asyncio
import contextlib
import json
import resource
import shutil
import socket
import tempfile
import time
from pathlib import Path

import pytest

from elastic_adapter.core.notices import NoticeBoard
from elastic_adapter.core.worker import Notices


@pytest.fixture
def path():
    # Not tmp_path: the path of a Unix socket has to be short.
    folder = tempfile.mkdtemp(prefix="elastic-test-")
    yield f"{folder}/notices.sock"
    shutil.rmtree(folder)


@pytest.fixture
def listen(path):
    """Makes listeners, which are closed after the test."""
    made = []

    def make():
        made.append(Notices(path))
        return made[-1]

    yield make
    for each in made:
        each.close()


def told(path, story):
    async def main():
        board = NoticeBoard(path)
        board.open()
        try:
            return await story(board)
        finally:
            board.close()

    return asyncio.run(main())


async def heard(listener, seconds=10):
    return await asyncio.get_running_loop().run_in_executor(None, listener.wait, seconds)


def test_all_listeners_hear_all_notices(path, listen):
    """Every worker that listens is told, in order, with all that the notice says."""

    async def story(board):
        listeners = [listen() for _ in range(3)]
        await asyncio.sleep(0.1)
        board.tell(notice="drain", grace_s=30.0, reason="n2 joined")
        board.tell(notice="leave", grace_s=5.0, reason="größe\n2")
        return [[await heard(each), await heard(each)] for each in listeners]

    first, *others = told(path, story)
    assert [each["notice"] for each in first] == ["drain", "leave"]
    assert first[1]["reason"] == "größe\n2"
    assert all(each == first for each in others)


def test_a_late_listener_hears_the_last_notice(path, listen):
    """Who comes too late is told what is about to happen, unless it is over."""

    async def story(board):
        board.tell(notice="leave", grace_s=5.0, reason="SIGTERM")
        late = await heard(listen())
        board.clear()
        return late, await heard(listen(), 0.2)

    late, after = told(path, story)
    assert late["notice"] == "leave"
    assert after is None


def test_polling_does_not_wait(path, listen):
    """A training asks between its steps and goes on when there is nothing."""

    async def story(board):
        listener = listen()
        nothing = listener.poll()
        await asyncio.sleep(0.1)
        board.tell(notice="leave", grace_s=5.0, reason="SIGTERM")
        return nothing, await heard(listener), listener.poll()

    nothing, notice, rest = told(path, story)
    assert nothing is None
    assert notice["notice"] == "leave"
    assert rest is None


def test_a_listener_that_does_not_read_holds_up_nobody(path, listen):
    """The agent tells and goes on; a listener that is gone is forgotten."""

    async def story(board):
        deaf, gone, good = listen(), listen(), listen()
        gone.close()
        await asyncio.sleep(0.1)
        for number in range(5000):
            board.tell(notice="drain", grace_s=1.0, reason="x" * 1000, number=number)
        numbers = [(await heard(good))["number"] for _ in range(100)]
        deaf.close()
        return numbers

    assert told(path, story) == list(range(100))


def test_without_an_agent_there_are_no_notices(path, monkeypatch):
    """The same script runs without the launcher."""
    monkeypatch.delenv("ELASTIC_NOTICES", raising=False)
    assert Notices().poll() is None
    assert Notices(str(Path(path).with_name("nobody"))).wait(5) is None


def test_the_end_of_the_agent_is_the_end_of_notices(path, listen):
    """A listener whose agent is gone waits no longer."""

    async def story(board):
        listener = listen()
        await asyncio.sleep(0.1)
        board.close()
        return await heard(listener, None)

    assert told(path, story) is None


@pytest.mark.parametrize("told_before", [False, True], ids=["nothing unread", "with something unread"])
def test_last_words(path, told_before):
    """What a worker said before it went is heard, also if it was just being told something when it had gone."""

    async def story(board):
        said, listeners, over = [], [], asyncio.Event()

        def hear(listener, message):
            listeners.append(listener)
            said.append(message)

        board.hear, board.gone = hear, lambda _: over.set()
        with socket.socket(socket.AF_UNIX) as worker:
            worker.connect(path)
            worker.sendall(b'{"step": 1}\n')
            while not said:
                await asyncio.sleep(0.01)
            if told_before:
                board.tell(notice="drain")
            worker.sendall(b'{"step": 2}\n{"step": 3}\n')
        # The board has not had a chance to read since.
        listeners[0].tell(settled=1)
        listeners[0].tell(settled=2)
        await asyncio.wait_for(over.wait(), 10)
        return said

    assert told(path, story) == [{"step": 1}, {"step": 2}, {"step": 3}]


@pytest.mark.parametrize("known_before", [True, False], ids=["known", "not taken yet"])
def test_what_was_said_by_now_is_heard_at_once(path, known_before):
    """Whoever is to act on it need not wait for the loop's next turns, in which other news may come first."""

    async def story(board):
        said, gone = [], []
        board.hear, board.gone = (lambda _, message: said.append(message["step"])), gone.append
        with socket.socket(socket.AF_UNIX) as worker:
            worker.connect(path)
            if known_before:
                await asyncio.sleep(0.1)
            worker.sendall(b"".join(json.dumps({"step": step}).encode() + b"\n" for step in range(1000)))
            worker.sendall(b'{"step": ')
            board.drain()
            here = list(said)
            worker.sendall(b"1000}\n")
        board.drain()
        return here, said, len(gone)

    assert told(path, story) == (list(range(1000)), list(range(1001)), 0)


def test_who_never_stops_talking_is_not_heard_for_ever(path):
    """What is said while all is heard that was said before has its turn later."""

    async def story(board):
        said = []
        board.hear = lambda _, message: (said.append(message), worker.sendall(b'{"step": 1}\n'))
        with socket.socket(socket.AF_UNIX) as worker:
            worker.connect(path)
            worker.sendall(b'{"step": 0}\n')
            board.drain()
            here = list(said)
            await asyncio.sleep(0.1)
        return here, len(said) > 1

    assert told(path, story) == ([{"step": 0}], True)


@pytest.mark.parametrize(
    "words",
    [b"{\n", b"\xff\n", b"x" * (2 << 20), b"[" * 100_000 + b"\n"],
    ids=["torn", "no text", "without an end", "nested"],
)
def test_who_can_not_be_understood_is_not_listened_to(path, words):
    """And harms nobody else."""

    async def story(board):
        said, over = [], asyncio.Event()
        board.hear, board.gone = (lambda _, message: said.append(message)), lambda _: over.set()
        with socket.socket(socket.AF_UNIX) as bad, socket.socket(socket.AF_UNIX) as good:
            bad.connect(path)
            good.connect(path)
            sending = asyncio.get_running_loop().run_in_executor(None, try_to_send, bad, words)
            await asyncio.wait_for(over.wait(), 10)
            await sending
            good.sendall(b'7\n{"step": 1}\n')
            while not said:
                await asyncio.sleep(0.01)
        return said

    assert told(path, story) == [{"step": 1}]


def try_to_send(worker, words):
    with contextlib.suppress(OSError):
        worker.sendall(words)


def test_more_come_than_there_are_descriptors(path):
    """Those who can't be taken are taken later; the agent goes on meanwhile."""

    async def story(board):
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket(socket.AF_UNIX) as worker:
            worker.connect(path)
            resource.setrlimit(resource.RLIMIT_NOFILE, (worker.fileno(), limits[1]))
            try:
                turns = 0
                end = time.monotonic() + 0.3
                while time.monotonic() < end:
                    await asyncio.sleep(0.01)
                    turns += 1
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            said = []
            board.hear = lambda _, message: said.append(message)
            worker.sendall(b'{"step": 1}\n')
            for _ in range(1000):
                await asyncio.sleep(0.01)
                if said:
                    break
        return turns > 1, said

    assert told(path, story) == (True, [{"step": 1}])


def test_who_does_not_read_loses_whole_lines(path):
    """However long it did not, what it reads then is no torn line, and what comes after that is heard."""

    async def story(board):
        with socket.socket(socket.AF_UNIX) as worker:
            worker.connect(path)
            await asyncio.sleep(0.1)
            for number in range(2000):
                board.tell(number=number, reason="x" * 1000)
            worker.settimeout(10)
            with worker.makefile("rb") as lines:
                first = [json.loads(lines.readline())["number"] for _ in range(10)]
                reading = asyncio.get_running_loop().run_in_executor(None, until_told, lines, "end")
                while not reading.done():
                    board.tell(number="end", reason="")
                    await asyncio.sleep(0.05)
                return first, await reading

    first, rest = told(path, story)
    assert first == list(range(10))
    assert rest == list(range(10, 10 + len(rest)))
    assert len(rest) < 1900, "nothing is kept without bound"


def until_told(lines, last):
    found = []
    for line in lines:
        number = json.loads(line)["number"]
        if number == last:
            return found
        found.append(number)
    return None
