"""The page through which ranks agree on where to save: workers that run as fast as they can, and one who asks."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time

import pytest

from elastic_adapter.core.checkpoint.agent_link import AgentLink
from elastic_adapter.core.checkpoint.page import DONE, NOWHERE, SAVE_AT, SavePages, open_page

RANKS = 3


@pytest.fixture
def agent_socket(tmp_path):
    """Somebody who listens, and says nothing."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "notices"))
        server.listen()
        yield server


@pytest.fixture
def agent(agent_socket):
    return agent_socket.getsockname()


def environ(pages, agent, rank):
    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": RANKS,
        "GENERATION": 1,
        "SAVE_PAGE": pages.path(rank),
        "NOTICES": agent,
    }
    return {f"ELASTIC_{name}": str(value) for name, value in names.items()}


@contextlib.contextmanager
def workers(pages, agent, log, stride=1):
    """A process for each rank: they wait for each other every now and then, and note where they were asked to save.

    At the end they are told to stop, and have ended then; where something went wrong, they are killed.
    """
    pids = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            try:
                link = AgentLink(environ(pages, agent, rank))
                with open(log / str(rank), "w") as file:
                    done = 0
                    others = [open_page(pages.path(other)) for other in range(RANKS)]
                    while not (log / "stop").exists():
                        if done > min(other[DONE] for other in others) + rank * 10:
                            continue
                        done += stride
                        if link.asked(done) is not None:
                            file.write(f"{done}\n")
                            file.flush()
            finally:
                os._exit(0)
        pids.append(pid)
    try:
        yield
        (log / "stop").touch()
        while pids:
            os.waitpid(pids[-1], 0)
            pids.pop()
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@pytest.mark.parametrize("stride", [1, 4])
def test_all_ranks_save_at_the_same_step(tmp_path, agent, stride):
    """However far apart they are, in whatever steps they count, and whenever it comes: nobody is past it by then."""
    pages = SavePages(tmp_path)
    for rank in range(RANKS):
        pages.path(rank)
    pages.begin(1)
    asked = []
    with workers(pages, agent, tmp_path, stride):
        while any(pages.done(rank) == 0 for rank in range(RANKS)):
            time.sleep(0.001)
        for number in range(40):
            pages.pause()
            time.sleep(0.001)
            asked.append(max(pages.done(rank) for rank in range(RANKS)) + 1)
            pages.answer(asked[-1])
            while any(pages.done(rank) <= asked[-1] + stride for rank in range(RANKS)):
                time.sleep(0.0005 * (number % 3))
    expected = [-(-step // stride) * stride for step in asked]
    for rank in range(RANKS):
        assert [int(line) for line in (tmp_path / str(rank)).read_text().split()] == expected


def test_workers_wait_until_they_are_told(tmp_path, agent):
    """Between the two words nobody does a step: the answer may be one that none has reached."""
    pages = SavePages(tmp_path)
    for rank in range(RANKS):
        pages.path(rank)
    pages.begin(1)
    with workers(pages, agent, tmp_path):
        while any(pages.done(rank) == 0 for rank in range(RANKS)):
            time.sleep(0.001)
        pages.pause()
        time.sleep(0.2)
        before = [pages.done(rank) for rank in range(RANKS)]
        time.sleep(0.2)
        assert [pages.done(rank) for rank in range(RANKS)] == before
        pages.answer(None)
        while any(pages.done(rank) == done for rank, done in enumerate(before)):
            time.sleep(0.001)
    assert [(tmp_path / str(rank)).read_text() for rank in range(RANKS)] == [""] * RANKS


@pytest.fixture
def one(tmp_path, agent):
    """The pages of a node, and the link of its only worker."""
    pages = SavePages(tmp_path)
    link = AgentLink(environ(pages, agent, 0))
    pages.begin(1)
    yield pages, link
    link.close()


def test_a_step_without_a_word(one):
    """Nothing is asked, nothing is answered, and the agent sees how far it is."""
    pages, link = one
    assert link.asked(7) is None
    assert pages.done(0) == 7


@pytest.mark.parametrize("hold", [False, True])
def test_asked_for_a_later_step(one, hold):
    """The answer is kept until that step, and is for that one alone."""
    pages, link = one
    pages.pause()
    pages.answer(9, hold=hold)
    assert link.asked(8) is None
    found = link.asked(9)
    assert found is not None
    assert found.hold is hold
    assert link.asked(10) is None


def test_asked_for_a_step_between_two(one, agent_socket):
    """Who counts in larger steps saves at the first one that is not before it, once."""
    pages, link = one
    pages.pause()
    pages.answer(9, hold=True)
    assert link.asked(8) is None
    assert link.asked(12).hold
    assert link.asked(16) is None
    connection, _ = agent_socket.accept()
    with connection:
        assert b"missed" not in connection.recv(4096)


@pytest.mark.parametrize("before", [False, True])
def test_the_agent_learns_who_looks(one, agent_socket, before):
    """Whoever looks at its page, or is going to, can be asked to save; that is said once."""
    _, link = one
    connection, _ = agent_socket.accept()
    with connection:
        connection.settimeout(0.05)
        with pytest.raises(TimeoutError):
            connection.recv(4096)
        if before:
            link.attend()
            assert connection.recv(4096) == b'{"looks": {"rank": 0}}\n'
        assert [link.asked(step) for step in (4, 5)] == [None] * 2
        if not before:
            assert connection.recv(4096) == b'{"looks": {"rank": 0}}\n'
        with pytest.raises(TimeoutError):
            connection.recv(4096)


def test_called_off(one):
    """Who holds goes on when somebody says so, without having been told to wait before."""
    pages, link = one
    pages.pause()
    pages.answer(1, hold=True)
    assert link.asked(1).hold
    pid = os.fork()
    if pid == 0:
        link.hold(30)
        os._exit(7)
    assert os.waitpid(pid, os.WNOHANG)[0] == 0
    pages.answer(None)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert link.asked(2) is None
    assert open_page(pages.path(0))[SAVE_AT] == NOWHERE


def test_a_new_generation_is_asked_nothing(one, agent):
    """What the last one was asked for is nothing to this one."""
    pages, _ = one
    pages.pause()
    pages.answer(5)
    pages.begin(2)
    later = AgentLink(environ(pages, agent, 0))
    assert [later.asked(step) for step in (4, 5, 6)] == [None] * 3
    later.close()
