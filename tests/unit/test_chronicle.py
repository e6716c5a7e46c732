"""What is written down of a job."""

from __future__ import annotations

import asyncio

import pytest

from elastic_adapter.core import chronicle
from elastic_adapter.core.chronicle import Chronicle, notes_of
from elastic_adapter.core.errors import Fenced, OutOfReach
from elastic_adapter.core.model import Level
from elastic_adapter.core.testing import Story, job_config


@pytest.mark.parametrize(
    ("script", "notes"),
    [
        pytest.param("join a", [("joined", "node a joined with 1 worker(s)")], id="joined"),
        pytest.param("join a; join a", [], id="the same one again"),
        pytest.param(
            "join a b",
            [
                ("joined", "node b joined with 1 worker(s)"),
                ("world", "generation 1: 2 workers on 2 node(s): 2 of 2 nodes are here"),
            ],
            id="world",
        ),
        pytest.param(
            "join a b; fail 1:3",
            [
                ("exit", "rank 1 on b exited with code 3 (generation 1)"),
                ("end", "failed: rank 1 on b exited with code 3; no restarts are allowed (--max-restarts 0)"),
            ],
            id="failure",
        ),
        pytest.param("join a b; ok 0", [("exit", "rank 0 on a exited with code 0 (generation 1)")], id="good exit"),
        pytest.param(
            "join a b; ok 0 1",
            [
                ("exit", "rank 1 on b exited with code 0 (generation 1)"),
                ("end", "succeeded: all workers ended with code 0"),
            ],
            id="success",
        ),
        pytest.param("join a b; hush b; join b@1", [], id="who was only silent has not joined"),
        pytest.param(
            "join a b; stop a", [("stop", "SIGINT on a"), ("end", "stopped: SIGINT on a")], id="stopped by a user"
        ),
    ],
)
def test_notes_of_the_last_step(script, notes):
    """Facts first, then what was decided of them."""
    seen = []

    class Noting(Story):
        def tell(self, event):
            before = self.job
            super().tell(event)
            seen[:] = notes_of(before, event, self.commands)

    Noting(job_config(Level.FAULT_TOLERANT, (2, 2))).play(script)
    assert seen == notes


class Registry:
    """Takes notes, after refusing as often as it is told to."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.written = []

    async def note(self, epoch, notes):
        if self.errors:
            raise self.errors.pop(0)
        self.written += [(note.epoch, note.number, note.kind, note.text) for note in notes]


def written(registry, texts):
    async def main():
        made = Chronicle(registry, lambda: 7)
        for text in texts:
            made.note("exit", text)
        writing = asyncio.create_task(made.write())
        await made.written(2.0)
        ended = writing.done()
        writing.cancel()
        return ended

    return asyncio.run(main())


def test_all_is_written_in_order(monkeypatch):
    """However long etcd takes to answer, and however much there is."""
    monkeypatch.setattr(chronicle, "_AGAIN_S", 0.0)
    registry = Registry(OutOfReach("no"), OutOfReach("no"))
    assert not written(registry, [str(number) for number in range(120)])
    assert registry.written == [(7, number + 1, "exit", str(number)) for number in range(120)]


def test_whoever_no_longer_leads_stops_writing():
    """Another one writes now."""
    registry = Registry(Fenced(7, 9))
    assert written(registry, ["a"])
    assert registry.written == []


def test_what_can_not_be_written_is_forgotten_in_the_end(monkeypatch):
    """A job that trains for weeks without an etcd does not fill its memory."""
    monkeypatch.setattr(chronicle, "_AGAIN_S", 0.0)
    registry = Registry()
    assert not written(registry, [str(number) for number in range(600)])
    assert [text for *_, text in registry.written] == [str(number) for number in range(100, 600)]
