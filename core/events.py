"""What can happen to a job (past tense) and what the job's machine asks for in return (imperative)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from elastic_adapter.core.blame import Inquest
from elastic_adapter.core.model import (
    CheckpointRef,
    Directive,
    Mark,
    Member,
    Outcome,
    Shard,
    StackReport,
    WorkerExit,
    World,
)
from elastic_adapter.core.restart import History


@dataclass(frozen=True, slots=True)
class MemberJoined:
    """An agent attached, for the first time or again, and told its full state."""

    member: Member
    # The generation whose workers are here, running or ended by themselves; None: none, or they were stopped.
    running: int | None = None
    # The last generation that the agent was given; None: not told, so that it counts as the job's.
    seen: int | None = None
    # The ends of that generation's workers: whoever led before may not have heard of them.
    exits: tuple[WorkerExit, ...] = ()
    # Whether it is being checked, and takes no part until that is over.
    checking: bool = False
    # Of that generation: the ranks here that can be asked to save, what they have saved and is not settled, and what
    # rank 0 found to go on from, where it was asked; None: it was not, or has not found out yet.
    savers: tuple[int, ...] = ()
    shards: tuple[Shard, ...] = ()
    found: tuple[CheckpointRef, ...] | None = None


@dataclass(frozen=True, slots=True)
class MemberSilent:
    """The node's stream is gone, but nothing proves that the node is: it may come back."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class MemberLost:
    """The node is given up. ``proven``: its agent is known to be dead, and its workers with it."""

    node: str
    reason: str
    proven: bool = True


@dataclass(frozen=True, slots=True)
class MemberReady:
    """The node's standbys are warm: it could start at once."""

    node: str


@dataclass(frozen=True, slots=True)
class Severed:
    """The registry is out of reach and a part of the world is silent: what is left of it can only hang."""

    reason: str


@dataclass(frozen=True, slots=True)
class MemberLeaving:
    """The node was asked to go (a signal to its agent) and waits for leave to do so."""

    node: str
    signal: int


@dataclass(frozen=True, slots=True)
class PortsOffered:
    """The agent holds these ports reserved now; they replace those it offered before."""

    node: str
    ports: tuple[int, ...]
    # The last generation that the agent had been given: a port that a later one took is no longer free.
    seen: int = 0


@dataclass(frozen=True, slots=True)
class WorkerExited:
    exit: WorkerExit


@dataclass(frozen=True, slots=True)
class WorkerErred:
    """A worker raised an exception that nobody caught, and is about to end, as ``exit`` says, if nothing hinders it."""

    exit: WorkerExit


@dataclass(frozen=True, slots=True)
class NodeDrained:
    node: str
    generation: int


@dataclass(frozen=True, slots=True)
class NodeStopped:
    """The node has stopped its workers of this generation without being told to."""

    node: str
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class NodeProgressed:
    """How far the workers of a node have got, by local rank."""

    node: str
    generation: int
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class StacksDumped:
    """What the workers of a node are doing, as it was asked."""

    node: str
    generation: int
    stacks: tuple[StackReport, ...]


@dataclass(frozen=True, slots=True)
class NodeChecked:
    """A node was checked. ``trouble``: why it is not fit to take part; empty: it is."""

    node: str
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class NodeCleared:
    """Somebody says that nothing is to be held against this node any more."""

    node: str


@dataclass(frozen=True, slots=True)
class CheckpointerOpened:
    """A worker looks after its steps whether it is to save: it can be asked to."""

    node: str
    generation: int
    rank: int


@dataclass(frozen=True, slots=True)
class CheckpointerClosed:
    """A worker that could be asked to save can't any more: it does no further step, or is gone."""

    node: str
    generation: int
    rank: int


@dataclass(frozen=True, slots=True)
class CheckpointNoted:
    """A worker met something about checkpoints that people should know of. Nothing is decided because of it."""

    node: str
    generation: int
    rank: int
    words: str


@dataclass(frozen=True, slots=True)
class SaveWanted:
    """A worker says that it is time for a checkpoint."""

    node: str
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class StepsReached:
    """The answer to a Pause: no worker of the node had done so many steps, and at its next one each waits."""

    node: str
    generation: int
    number: int
    step: int


@dataclass(frozen=True, slots=True)
class ShardReported:
    node: str
    generation: int
    shard: Shard


@dataclass(frozen=True, slots=True)
class CheckpointPrepared:
    """All of a checkpoint is on storage, and was read back. ``trouble``: why not."""

    node: str
    generation: int
    step: int
    uri: str = ""
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointEntered:
    """Whether the ledger has taken a checkpoint, as it was asked to."""

    generation: int
    step: int
    entered: bool


@dataclass(frozen=True, slots=True)
class CheckpointPublished:
    """The checkpoint has its name. ``pruned``: those that were deleted because of it."""

    node: str
    generation: int
    step: int
    trouble: str = ""
    pruned: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointsFound:
    """What rank 0 found to go on from, the newest first, and verified; the others were not looked into."""

    node: str
    generation: int
    found: tuple[CheckpointRef, ...]


@dataclass(frozen=True, slots=True)
class RestoreFailed:
    """A rank can't load the checkpoint that its world goes on from, and waits to be ended."""

    node: str
    generation: int
    rank: int
    name: str
    why: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """A user wants the whole job to end."""

    node: str
    signal: int


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing happened; a deadline named by ``job.deadline`` may be over."""


Event: TypeAlias = (
    MemberJoined
    | MemberSilent
    | MemberLost
    | MemberReady
    | MemberLeaving
    | Severed
    | PortsOffered
    | WorkerExited
    | WorkerErred
    | NodeDrained
    | NodeStopped
    | NodeProgressed
    | StacksDumped
    | NodeChecked
    | NodeCleared
    | CheckpointerOpened
    | CheckpointerClosed
    | CheckpointNoted
    | SaveWanted
    | StepsReached
    | ShardReported
    | CheckpointPrepared
    | CheckpointEntered
    | CheckpointPublished
    | CheckpointsFound
    | RestoreFailed
    | StopRequested
    | TimePassed
)


@dataclass(frozen=True, slots=True)
class Commit:
    """Make this world and the budget spent for it the truth, in one transaction, before anything is sent."""

    world: World
    history: History
    # What is still to be told of the generation before, should somebody else lead when it is time to.
    inquest: Inquest | None = None
    # The checkpoints of the run, the newest first.
    checkpoints: tuple[CheckpointRef, ...] = ()


@dataclass(frozen=True, slots=True)
class Keep:
    """Make it known to later leaders which ranks have ended with code 0, and what failed, if that can be had."""

    finished: frozenset[int]
    history: History
    inquest: Inquest | None = None
    checkpoints: tuple[CheckpointRef, ...] = ()


@dataclass(frozen=True, slots=True)
class Enter:
    """Make these the run's checkpoints. Whether that was done comes back as CheckpointEntered."""

    generation: int
    step: int
    checkpoints: tuple[CheckpointRef, ...]


@dataclass(frozen=True, slots=True)
class Conclude:
    """Make the outcome the truth."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Send:
    node: str
    directive: Directive


@dataclass(frozen=True, slots=True)
class Tell:
    """One line for the log, for a person; ``kind`` is what it is filed under. ``bad``: something went wrong."""

    reason: str
    kind: str = "decision"
    bad: bool = False


Command: TypeAlias = Commit | Keep | Enter | Conclude | Send | Tell
