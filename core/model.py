"""The values everything else is made of: members, worlds, exits, directives and outcomes.

Read this file first, then ``state.py`` and ``job.py``. Nothing here knows a clock, a socket or a process.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias


class Level(IntEnum):
    """How much the launcher does by itself when something is lost."""

    OFF = 0
    FAULT_TOLERANT = 1
    ELASTIC = 2


@dataclass(frozen=True, slots=True)
class Member:
    """A node that is present, whether or not the current world has a place for it."""

    node: str
    address: str
    slots: int
    # Grows with every join: the order in which nodes came.
    order: int
    # Ports that the node's agent holds reserved, each good for one generation's master.
    ports: tuple[int, ...] = ()
    # Where the node's agent listens; a port that refuses proves that the agent is gone.
    control: str = ""
    # Whether it could start at once: its standbys have imported everything, or it has none.
    warm: bool = True


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A place to connect to; as text HOST:PORT, with brackets around an IPv6 address."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        host, _, port = text.rpartition(":")
        return cls(host.strip("[]"), int(port))


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    step: int
    generation: int
    # The folder, as rank 0's node calls it.
    uri: str

    @property
    def name(self) -> str:
        """The same wherever a node has mounted the storage."""
        return self.uri.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Placement:
    """One node's part of a world: its workers have the ranks from ``rank_offset`` on."""

    node: str
    address: str
    slots: int
    rank_offset: int
    # Where the node's agent listens.
    control: str = ""


@dataclass(frozen=True, slots=True)
class Peer:
    """A node of a world as the others see it."""

    address: str
    slots: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one node needs in order to run its part of a world, whatever the number of nodes."""

    generation: int
    restart_count: int
    group_rank: int
    group_size: int
    rank_offset: int
    slots: int
    world_size: int
    master: Endpoint
    reason: str
    resume_from: CheckpointRef | None = None
    start_delay_s: float = 0.0
    # All nodes of the world, in the order of their ranks.
    peers: tuple[Peer, ...] = ()


@dataclass(frozen=True, slots=True)
class World:
    """Generation n of the job: who runs which ranks. The index of a placement is its group rank."""

    generation: int
    # Restarts charged to the budget so far; a change of membership does not raise it.
    restart_count: int
    placements: tuple[Placement, ...]
    master: Endpoint
    reason: str
    resume_from: CheckpointRef | None = None
    start_delay_s: float = 0.0

    @property
    def world_size(self) -> int:
        return sum(placement.slots for placement in self.placements)

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(placement.node for placement in self.placements)

    def ranks(self, node: str) -> frozenset[int]:
        """The ranks that run on this node; none where it has no place."""
        for placement in self.placements:
            if placement.node == node:
                return frozenset(range(placement.rank_offset, placement.rank_offset + placement.slots))
        return frozenset()

    def assignment(self, node: str) -> Assignment:
        group_rank = self.nodes.index(node)
        placement = self.placements[group_rank]
        return Assignment(
            generation=self.generation,
            restart_count=self.restart_count,
            group_rank=group_rank,
            group_size=len(self.placements),
            rank_offset=placement.rank_offset,
            slots=placement.slots,
            world_size=self.world_size,
            master=self.master,
            reason=self.reason,
            resume_from=self.resume_from,
            start_delay_s=self.start_delay_s,
            peers=tuple(Peer(each.address, each.slots) for each in self.placements),
        )


def exit_status(code: int | None, signal_number: int | None) -> int:
    """The shell's convention: the code itself, or 128 + the signal's number."""
    return 128 + signal_number if signal_number is not None else code or 0


def signal_name(number: int) -> str:
    """SIGKILL for 9; real-time signals have no name of their own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def signal_number(name: str) -> int | None:
    """9 for SIGKILL, KILL or kill; None: there is no such signal."""
    known = {each.name: int(each) for each in signal.Signals}
    return known.get(name.upper()) or known.get("SIG" + name.upper())


# The exit code of a worker that hangs, as timeout(1) has it.
HUNG = 124


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """A worker ended. Exactly one of ``code`` and ``signal`` is set."""

    node: str
    generation: int
    local_rank: int
    rank: int
    code: int | None
    signal: int | None
    # Wall clock of the node, seconds since the epoch: for people, never for decisions.
    at: float
    pid: int = 0
    # Where the failure's words come from ("traceback", "error file", "stderr") and the words.
    detail_source: str = ""
    detail: str = ""
    # The uncaught exception in one line, where there was one.
    error: str = ""
    # How long it lived, in seconds; None: not known.
    age_s: float | None = None
    # The last step that it told of; None: it told of none.
    step: int | None = None
    # Whether the kernel was killing for want of memory when it was killed.
    oom: bool = False
    # Why it is taken to hang, where it did not end by itself; its code is HUNG then.
    hang: str = ""
    # The file with the stacks of its threads, on its node.
    stack_file: str = ""

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def status(self) -> int:
        return exit_status(self.code, self.signal)

    @property
    def how(self) -> str:
        if self.hang:
            return f"hangs: {self.hang}"
        if self.oom:
            return "was killed by SIGKILL, by all signs the kernel's OOM killer"
        if self.signal is not None:
            return f"was killed by {signal_name(self.signal)}"
        return f"exited with code {self.code}"


@dataclass(frozen=True, slots=True)
class Succeeded:
    reason: str = "all workers ended with code 0"

    @property
    def exit_code(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Failed:
    """The job is over without success. ``first`` is the failure that decided it, where a worker did."""

    reason: str
    first: WorkerExit | None = None
    # Whether it is over for this node alone.
    alone: bool = False
    # The other failures of that generation, and how many more there were.
    others: tuple[WorkerExit, ...] = ()
    more: int = 0
    # How many restarts the budget had left; None: no worker failed.
    restarts_left: int | None = None

    @property
    def exit_code(self) -> int:
        return self.first.status if self.first is not None else 1


@dataclass(frozen=True, slots=True)
class Stopped:
    """Somebody asked for the end."""

    reason: str
    signal: int
    # Whether it is over for this node alone.
    alone: bool = False
    # The exit code that the user chose for a node that leaves; None: the shell's for the signal.
    code: int | None = None

    @property
    def exit_code(self) -> int:
        return 128 + self.signal if self.code is None else self.code


Outcome: TypeAlias = Succeeded | Failed | Stopped


class Part(IntEnum):
    """What has become of one rank's part of a checkpoint."""

    # It is in shared memory, and outlives the worker.
    STAGED = 0
    WRITTEN = 1
    # It will not be written.
    MISSED = 2


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a checkpoint."""

    rank: int
    step: int
    part: Part
    why: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a generation failed, as far as was heard, and what was decided about it."""

    generation: int
    first: WorkerExit
    # The other failures, and how many more there were than are listed.
    others: tuple[WorkerExit, ...]
    more: int
    decision: str
    restarts_left: int


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a worker has got: how often it told of progress, and the last step that it told of."""

    count: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True)
class StackReport:
    """What a worker was doing when its stacks were asked for."""

    rank: int
    # Where it is in the user's own code; empty: not known, and ``text`` says why.
    place: str = ""
    # What it waits in, if it waits for other workers.
    waits: str = ""
    text: str = ""
    file: str = ""
    pid: int = 0
    # Wall clock of the node, for people.
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """Stop whatever runs of an older generation, then run this part of the world."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Drain:
    """Tell the workers to save, then stop them, within ``grace_s``, and report that it is done."""

    generation: int
    grace_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Hold:
    """Stop the workers and wait for the next world."""

    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """There is no place for this node yet: what it waits for, for people."""

    reason: str


@dataclass(frozen=True, slots=True)
class Halt:
    """Stop the workers and end the agent with the outcome's code."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Dump:
    """Write down where the workers are, and report it; nothing is stopped yet."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Check:
    """Stop the workers, and find out whether this node is fit for more."""

    reason: str


@dataclass(frozen=True, slots=True)
class Explain:
    """What became of a generation, for the people who look at this node."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Pause:
    """Tell how far the workers can have got when they hear this: they wait there until they know where all save."""

    generation: int
    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class SaveAt:
    """All ranks save as soon as at least so many steps are done; None: nowhere, they go on."""

    generation: int
    number: int
    step: int | None
    # Whether they do no further step after that.
    hold: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Prepare:
    """All parts of a checkpoint are written: put it together, and read it back."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Publish:
    """The checkpoint is in the ledger: give it its name."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Settle:
    """The checkpoint of this step has its name, and all before it are past. ``trouble``: why it has no name."""

    generation: int
    step: int
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Drop:
    """No checkpoint comes of this step: tell those who wait for it why, and remove what is written of it."""

    generation: int
    step: int
    why: str


@dataclass(frozen=True, slots=True)
class Resume:
    """What all ranks of a world go on from that named none itself; None: from the beginning."""

    generation: int
    checkpoint: CheckpointRef | None


# What is said of checkpoints: it changes nothing for the lives of workers.
SaveDirective: TypeAlias = Pause | SaveAt | Prepare | Publish | Settle | Drop | Resume
Directive: TypeAlias = Run | Drain | Hold | Wait | Halt | Dump | Check | Explain | SaveDirective


@dataclass(frozen=True, slots=True)
class Seat:
    """One worker's place in a world, with everything an adapter may want to tell the worker."""

    assignment: Assignment
    local_rank: int
    job_id: str
    node: str
    max_restarts: int
    role: str = "default"
    error_file: str = ""
    # The socket on which the agent gives notice of what it is about to do.
    notices: str = ""

    @property
    def rank(self) -> int:
        return self.assignment.rank_offset + self.local_rank
