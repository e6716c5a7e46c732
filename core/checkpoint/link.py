"""What a Checkpointer needs of whoever runs it: the launcher's agent, or, without a launcher, this very process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from elastic_adapter.core.checkpoint.framework import Group
from elastic_adapter.core.errors import ElasticError


class NotRestored(ElasticError):
    """There are checkpoints, and none of them can be restored. Nothing was begun from zero."""


@dataclass(frozen=True, slots=True)
class Post:
    """Where this process saves from: its place in the world, and what its checkpoints are called after."""

    rank: int
    world_size: int
    # 0 without a launcher.
    generation: int
    # Where buffers are to be made: a folder in memory that goes with the job.
    folder: Path
    # Of the names of buffers: what other processes of this node do not use.
    slot: str
    # The same for all ranks that write one checkpoint, and for no other run.
    token: str
    job: str | None = None
    run: str | None = None
    # The names of buffers in there that are still to be written; a full one not among them is nobody's any more.
    busy: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Finishing:
    """What is to be done once all ranks have written their part."""

    verify: str = "sample"
    md5: bool = False
    keep_last: int | None = None
    keep_every: int | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """What rank 0 found in the folder: the name of the checkpoint to go on from, verified, and those before it."""

    # Names of folders, the newest first; the first one is verified. Empty: there is nothing yet.
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """Somebody wants the state to be saved now."""

    reason: str
    # The world is about to be replaced: do no further step after this one.
    hold: bool = False


def resume_together(group: Group | None, rank: int, size: int, find: Callable[[], Found]) -> str | None:
    """Rank 0 finds out what to go on from, and tells the others over the group; its error is everybody's."""
    if size == 1 or group is None:
        return next(iter(find().names), None)
    if rank:
        name, why = group.broadcast(None)
        if why is not None:
            raise NotRestored(f"rank 0 did not restore: {why}")
        return str(name) if name is not None else None
    try:
        name = next(iter(find().names), None)
    except Exception as error:
        group.broadcast((None, f"{type(error).__name__}: {error}"))
        raise
    group.broadcast((name, None))
    return name


class Link(Protocol):
    """All calls are made by the thread that trains. Only those that say so wait."""

    def open(self, root: str) -> Post:
        """Say that checkpoints are made below this folder; where this process stands. Called once."""
        ...

    def resume(self, find: Callable[[], Found]) -> str | None:
        """The name of the checkpoint that all ranks restore; None: begin from zero. Waits for whoever decides.

        Where nobody has decided, ``find`` is called, on rank 0, and what it finds is what all ranks are told. Whoever
        asks again, to go back, is told what there is by then.
        """
        ...

    def not_restored(self, name: str, why: str) -> NotRestored:
        """Say that what ``resume`` named can't be loaded here.

        Waits to be ended, because all ranks begin anew with another one. The error to raise, if that does not happen.
        """
        ...

    def attend(self) -> None:
        """``asked`` is going to be called from the next step on, as far as is known."""
        ...

    def asked(self, done: int) -> Asked | None:
        """So many steps are done: is this where all ranks save? May wait for a moment until that is agreed upon."""
        ...

    def want(self, reason: str) -> None:
        """Say that it is time to save, as far as this rank can tell. What comes of it, ``asked`` tells all ranks."""
        ...

    def note(self, words: str) -> None:
        """Have it told where people look for what has happened to the job, if there is such a place."""
        ...

    def staged(self, buffer: Path, root: str, step: int, finishing: Finishing) -> None:
        """Hand over this rank's part of a checkpoint, which is in this buffer: it is written beside all else."""
        ...

    def missed(self, step: int, why: str) -> None:
        """Say that this rank's part of a checkpoint that others may be writing will not come, and why."""
        ...

    def hold(self, seconds: float) -> None:
        """Wait to be stopped, for so long at most."""
        ...

    def settled(self, seconds: float | None = None) -> bool:
        """Wait until nothing that this rank staged is still to be written; whether that came in time."""
        ...

    def troubles(self) -> tuple[str, ...]:
        """What went wrong since this was last asked, for people. Of what a launcher tells, only what was waited for."""
        ...

    def close(self) -> None: ...
