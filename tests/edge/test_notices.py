"""What a worker hears from its agent over the socket of notices."""

import asyncio
import shutil
import tempfile
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
        await board.open()
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
