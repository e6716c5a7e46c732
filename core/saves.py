"""Checkpoints in the job's machine: from the ranks' parts to an entry in the ledger. Pure; ``job.step`` calls it.

A checkpoint exists when all ranks have written their parts, rank 0's node has put them together and read them back, and
the ledger has taken it. Whatever comes from another generation than the one that runs is dropped, so that a late save
never becomes the newest one. Whatever becomes of one, all nodes are told: ranks may wait for it, and what is written of
one that will not come is in the way.

Where ranks are asked to save, they agree on the step without a collective: first each is told to wait at its next step,
and each node says how far its workers have got; at the first step beyond the largest of these all save.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TypeAlias

from elastic_adapter.core.errors import assert_never
from elastic_adapter.core.events import (
    CheckpointEntered,
    CheckpointerClosed,
    CheckpointerOpened,
    CheckpointPrepared,
    CheckpointPublished,
    Command,
    Enter,
    Send,
    ShardReported,
    StepsReached,
    Tell,
)
from elastic_adapter.core.ledger import ENTRIES_KEPT, Ask, Save, Stage
from elastic_adapter.core.model import (
    CheckpointRef,
    Drop,
    Part,
    Pause,
    Prepare,
    Publish,
    SaveAt,
    SaveDirective,
    Settle,
    Shard,
    World,
)
from elastic_adapter.core.state import Job, Running

Step: TypeAlias = tuple[Job, tuple[Command, ...]]
SaveEvent: TypeAlias = (
    CheckpointerOpened
    | CheckpointerClosed
    | StepsReached
    | ShardReported
    | CheckpointPrepared
    | CheckpointEntered
    | CheckpointPublished
)
# How long nodes may take to say how far their workers are.
_ANSWER_S = 5.0
# When a ledger that could not be reached is asked again.
_AGAIN_S = 1.0
# When ranks that were asked to save, and did not, may be asked again.
_STALE_S = 600.0
# How long ranks may take to stage their parts, after the first of them: a little longer than one waits for a buffer.
_STAGED_S = 660.0
# How many checkpoints may lack parts at a time. Each is a draft on the storage.
_MOST_LACKING = 4
# So many ranks are named.
_MOST_NAMED = 8


def can_ask(job: Job) -> bool:
    """Whether all ranks of the world are there and save checkpoints."""
    world, phase = job.world, job.phase
    if world is None or not isinstance(phase, Running) or phase.finished or phase.exits or job.absent:
        return False
    return job.saves.savers.issuperset(range(world.world_size))


def ask(job: Job, reason: str, now: float, *, hold: bool) -> Step:
    """Ask all ranks to save, at the first step at which all of them can."""
    world, number = job.world, job.saves.asked + 1
    assert world is not None
    saves = replace(job.saves, asked=number, ask=Ask(number, reason, hold, now + _ANSWER_S))
    return replace(job, saves=saves), (
        Tell(f"all ranks are asked to save: {reason}", "checkpoint"),
        *_to(job, world.nodes, Pause(world.generation, number, reason)),
    )


def call_off(job: Job, why: str) -> Step:
    """Nobody need wait for a save that was asked for: all go on."""
    world, number = job.world, job.saves.asked + 1
    assert world is not None
    job = replace(job, saves=replace(job.saves, ask=None, asked=number))
    return job, _to(job, world.nodes, SaveAt(world.generation, number, None, hold=False, reason=why))


def hear(job: Job, event: SaveEvent, now: float) -> Step:
    """Take news of the checkpoints of the world; what that means for the world itself is not decided here."""
    world = job.world
    if world is None or event.generation != world.generation:
        return job, ()
    if not isinstance(event, CheckpointEntered) and event.node not in world.nodes:
        return job, ()
    if isinstance(event, CheckpointPrepared | CheckpointPublished) and event.node != world.nodes[0]:
        return job, ()
    match event:
        case CheckpointerOpened() | CheckpointerClosed():
            return _looks(job, event, world)
        case StepsReached():
            return _reached(job, event, world)
        case ShardReported():
            return _shard(job, event, world, now)
        case CheckpointPrepared():
            return _prepared(job, event, world, now)
        case CheckpointEntered():
            return _entered(job, event, world, now)
        case CheckpointPublished():
            return _published(job, event, world)
        case _:
            assert_never(event)


def time_passed(job: Job, now: float) -> Step:
    """What a deadline of checkpoints asks for, if one is over."""
    saves = job.saves
    if saves.ask is not None and saves.ask.step is None and now >= saves.ask.until:
        missing = ", ".join(sorted(set(job.world.nodes if job.world else ()) - {node for node, _ in saves.ask.bounds}))
        after, commands = call_off(job, "nodes did not answer")
        return after, (
            Tell(f"no checkpoint: {missing} did not say in time where its workers are", "checkpoint", bad=True),
            *commands,
        )
    if job.world is None:
        return job, ()
    if late := tuple(each for each in saves.under_way if each.staged_by is not None and now >= each.staged_by):
        return _give_up_all(job, job.world, late)
    if any(each.enter_at is not None and now >= each.enter_at for each in saves.under_way):
        return _enter_newest(job, now)
    return job, ()


def unfinished(job: Job) -> tuple[Command, ...]:
    """At the end of the job: which checkpoints will never be, because not all ranks have saved there."""
    size = job.world.world_size if job.world is not None else 0
    steps = [str(each.step) for each in job.saves.under_way if not each.staged.issuperset(range(size))]
    words = f"no checkpoint of step {', '.join(steps)}: the job ended before all ranks had saved there"
    return (Tell(words, "checkpoint", bad=True),) if steps else ()


def is_busy(job: Job, now: float) -> bool:
    """Whether ranks were asked to save, so that there is no need to ask them. Where nothing came of it, there is."""
    ask = job.saves.ask
    return ask is not None and now < ask.until + _STALE_S


def has_staged(job: Job, node: str) -> bool:
    """Whether all ranks of a node have done what they were asked to."""
    return job.world is not None and _have_staged(job, job.world.ranks(node))


def orders(job: Job) -> tuple[Prepare | Publish, ...]:
    """What rank 0's node is to do, and has not said that it has."""
    generation = job.world.generation if job.world is not None else 0
    kinds: dict[Stage, type[Prepare | Publish]] = {Stage.PREPARING: Prepare, Stage.PUBLISHING: Publish}
    return tuple(kinds[each.stage](generation, each.step) for each in job.saves.under_way if each.stage in kinds)


def entries(job: Job) -> tuple[CheckpointRef, ...]:
    """The ledger with the checkpoint that it was asked to take, if it has not answered: that may be there already."""
    entering = next((each for each in job.saves.under_way if each.is_entering), None)
    return job.checkpoints if entering is None else _with_entry(job, entering)


def overdue(job: Job, node: str, shards: Iterable[Shard]) -> tuple[Command, ...]:
    """Tell an agent what became of checkpoints that it still has parts of: it was away when the others were told."""
    world = job.world
    assert world is not None
    steps = dict.fromkeys(shard.step for shard in shards if shard.rank in world.ranks(node))
    return tuple(Send(node, _last_word(job, world, step)) for step in steps if _is_over(job, world, step))


def with_savers(job: Job, savers: frozenset[int]) -> Job:
    return replace(job, saves=replace(job.saves, savers=savers))


def _have_staged(job: Job, ranks: Collection[int]) -> bool:
    """Whether these have saved where they were asked to, or later."""
    asked = job.saves.ask.step if job.saves.ask is not None else None
    if asked is None:
        return False
    return any(each.step >= asked and each.staged.issuperset(ranks) for each in job.saves.under_way)


def _looks(job: Job, event: CheckpointerOpened | CheckpointerClosed, world: World) -> Step:
    """A rank looks from now on whether it is asked to save, or does so no more: then nobody waits for its answer."""
    rank, savers = event.rank, job.saves.savers
    if rank not in world.ranks(event.node):
        return job, ()
    if isinstance(event, CheckpointerOpened):
        return with_savers(job, savers | {rank}), ()
    job = with_savers(job, savers - {rank})
    if rank not in savers or job.saves.ask is None or _have_staged(job, {rank}):
        return job, ()
    why = f"rank {rank} on {event.node} saves no more"
    job, commands = call_off(job, why)
    return job, (Tell(f"no checkpoint: {why}", "checkpoint", bad=True), *commands)


def _reached(job: Job, event: StepsReached, world: World) -> Step:
    found = job.saves.ask
    if found is None or found.step is not None or event.number != found.number:
        return job, ()
    bounds = (*(each for each in found.bounds if each[0] != event.node), (event.node, event.step))
    found = replace(found, bounds=bounds)
    if {node for node, _ in bounds} != set(world.nodes):
        return replace(job, saves=replace(job.saves, ask=found)), ()
    step = max(step for _, step in bounds)
    found = replace(found, step=step)
    directive = SaveAt(world.generation, found.number, step, found.hold, found.reason)
    return replace(job, saves=replace(job.saves, ask=found)), _to(job, world.nodes, directive)


def _shard(job: Job, event: ShardReported, world: World, now: float) -> Step:
    shard = event.shard
    if shard.rank not in world.ranks(event.node):
        return job, ()
    if _is_over(job, world, shard.step):
        return job, _to(job, (event.node,), _last_word(job, world, shard.step))
    known = job.saves.find(shard.step) or Save(shard.step, staged_by=now + _STAGED_S)
    if known.stage is not Stage.WRITING or shard.rank in known.written:
        return job, ()
    if (entry := _entry(job, world, shard.step)) is not None:
        return _entered_before(job, known, entry, world)
    if shard.part is Part.MISSED:
        return _give_up(job, world, shard.step, f"rank {shard.rank} on {event.node}: {shard.why}")
    save = known.with_shard(shard)
    if save == known:
        return job, ()
    everybody = range(world.world_size)
    if save.staged.issuperset(everybody):
        save = replace(save, staged_by=None)
    prepare: tuple[Command, ...] = ()
    if save.written.issuperset(everybody):
        save = replace(save, stage=Stage.PREPARING)
        prepare = _to_host(job, world, Prepare(world.generation, save.step))
    job, commands = _without_hopeless(replace(job, saves=job.saves.with_save(save)), shard, world)
    return job, (*commands, *prepare)


def _is_over(job: Job, world: World, step: int) -> bool:
    """Whether it is too late for a part of this checkpoint: there is a later one, or it is done with."""
    if job.saves.find(step) is not None:
        return False
    later = any(each.generation == world.generation and each.step > step for each in job.checkpoints)
    return later or job.saves.end_of(step) is not None


def _last_word(job: Job, world: World, step: int) -> Settle | Drop:
    """What became of a checkpoint that is done with."""
    why = job.saves.end_of(step)
    if why == "" or _entry(job, world, step) is not None:
        return Settle(world.generation, step)
    return Drop(world.generation, step, why or "there is a later one")


def _entry(job: Job, world: World, step: int) -> CheckpointRef | None:
    place = (world.generation, step)
    return next((each for each in job.checkpoints if (each.generation, each.step) == place), None)


def _entered_before(job: Job, save: Save, entry: CheckpointRef, world: World) -> Step:
    """All had written it: whoever led before had it entered, and did not hear that it has its name, or did not say."""
    save = replace(save, stage=Stage.PUBLISHING, uri=entry.uri, staged_by=None)
    return replace(job, saves=job.saves.with_save(save)), _to_host(job, world, Publish(world.generation, save.step))


def _without_hopeless(job: Job, shard: Shard, world: World) -> Step:
    """Give up what will not be made any more: who saves a later step saves no earlier one; and what is one too many."""
    commands: tuple[Command, ...] = ()
    lacking = [each for each in job.saves.under_way if each.stage is Stage.WRITING]
    for each in lacking:
        if each.step < shard.step and shard.rank not in each.staged:
            instead = f"saved step {shard.step} instead; do all ranks save at the same steps?"
            job, more = _give_up(job, world, each.step, f"{_ranks((shard.rank,), world)} {instead}")
            commands = (*commands, *more)
    lacking = [each for each in job.saves.under_way if each.stage is Stage.WRITING]
    job, more = _give_up_all(job, world, lacking[: max(0, len(lacking) - _MOST_LACKING)])
    return job, (*commands, *more)


def _give_up_all(job: Job, world: World, late: Iterable[Save]) -> Step:
    """Of those who did not do their part, say who it is."""
    commands: tuple[Command, ...] = ()
    for each in late:
        everybody = frozenset(range(world.world_size))
        if absent := everybody - each.staged:
            why = f"{_ranks(absent, world)} did not save there; do all ranks make a Checkpointer and call step?"
        else:
            why = f"{_ranks(everybody - each.written, world)} had not written it when {_MOST_LACKING} later ones came"
        job, more = _give_up(job, world, each.step, why)
        commands = (*commands, *more)
    return job, commands


def _give_up(job: Job, world: World, step: int, why: str) -> Step:
    """No checkpoint comes of this step. Who asked for it has an answer."""
    saves = job.saves
    saves = replace(saves.without(step, why=why), ask=None if saves.is_asked_for(step) else saves.ask)
    drop = Drop(world.generation, step, why)
    told = Tell(f"no checkpoint of step {step}: {why}", "checkpoint", bad=True)
    return replace(job, saves=saves), (told, *_to(job, world.nodes, drop))


def _ranks(ranks: Collection[int], world: World) -> str:
    named = ", ".join(map(str, sorted(ranks)[:_MOST_NAMED])) + (" ..." if len(ranks) > _MOST_NAMED else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {named} of {world.world_size}"


def _prepared(job: Job, event: CheckpointPrepared, world: World, now: float) -> Step:
    save = job.saves.find(event.step)
    if save is None or save.stage is not Stage.PREPARING:
        return job, ()
    if event.trouble:
        return _give_up(job, world, event.step, event.trouble)
    return _enter(job, replace(save, uri=event.uri), now)


def _enter_newest(job: Job, now: float) -> Step:
    """Of those that the ledger could not take, the newest: the others are past when that is in."""
    *older, newest = (each for each in job.saves.under_way if each.enter_at is not None)
    for each in older:
        job = replace(job, saves=job.saves.with_save(replace(each, enter_at=now + _AGAIN_S)))
    return _enter(job, newest, now)


def _enter(job: Job, save: Save, now: float) -> Step:
    world = job.world
    assert world is not None
    save = replace(save, stage=Stage.ENTERING, enter_at=None)
    if any(each.is_entering and each.step != save.step for each in job.saves.under_way):
        # One after the other: what the ledger is to hold then is not known before it answers.
        return replace(job, saves=job.saves.with_save(replace(save, enter_at=now + _AGAIN_S))), ()
    job = replace(job, saves=job.saves.with_save(save))
    return job, (Enter(world.generation, save.step, _with_entry(job, save)),)


def _with_entry(job: Job, save: Save) -> tuple[CheckpointRef, ...]:
    assert job.world is not None
    ref = CheckpointRef(save.step, job.world.generation, save.uri)
    return (ref, *(each for each in job.checkpoints if each != ref))[:ENTRIES_KEPT]


def _entered(job: Job, event: CheckpointEntered, world: World, now: float) -> Step:
    save = job.saves.find(event.step)
    if save is None or not save.is_entering:
        return job, ()
    if not event.entered:
        return replace(job, saves=job.saves.with_save(replace(save, enter_at=now + _AGAIN_S))), ()
    saves = job.saves.with_save(replace(save, stage=Stage.PUBLISHING))
    # The newest is the first: an earlier one that is not in the ledger by now comes too late. Who asked for such a one
    # has an answer when this one has its name.
    late = tuple(each.step for each in saves.under_way if each.step < save.step and each.stage is not Stage.PUBLISHING)
    why = f"there is a later one, of step {save.step}"
    job = replace(job, saves=saves.without(*late, why=why), checkpoints=_with_entry(job, save))
    drops = tuple(each for step in late for each in _to(job, world.nodes, Drop(world.generation, step, why)))
    publish = _to_host(job, world, Publish(world.generation, save.step))
    # Those that waited for this answer come in their order, so that none of them is overtaken.
    waiting = next((each for each in job.saves.under_way if each.enter_at is not None), None)
    job, enter = _enter(job, waiting, now) if waiting is not None else (job, ())
    return job, (*drops, *publish, *enter)


def _published(job: Job, event: CheckpointPublished, world: World) -> Step:
    saves, save = job.saves, job.saves.find(event.step)
    if save is None or save.stage is not Stage.PUBLISHING:
        return job, ()
    # What ranks staged before it and did not finish, they will not finish any more.
    over = (each.step for each in saves.under_way if each.step <= event.step)
    answered = saves.ask is not None and saves.ask.step is not None and saves.ask.step <= event.step
    saves = replace(saves.without(*over), ask=None if answered else saves.ask)
    kept = tuple(each for each in job.checkpoints if each.name not in event.pruned)
    trouble = f"it could not be given its name: {event.trouble}" if event.trouble else ""
    words = f"checkpoint of step {event.step} is committed: {save.uri}{'; ' if trouble else ''}{trouble}"
    settle = Settle(world.generation, event.step, trouble)
    return replace(job, saves=saves, checkpoints=kept), (
        Tell(words, "checkpoint"),
        *_to(job, world.nodes, settle),
    )


def _to_host(job: Job, world: World, directive: Prepare | Publish) -> tuple[Command, ...]:
    """To rank 0's node; if it is away, it is told when it comes back."""
    return _to(job, world.nodes[:1], directive)


def _to(job: Job, nodes: tuple[str, ...], directive: SaveDirective) -> tuple[Command, ...]:
    """To those of these nodes that are here."""
    return tuple(Send(node, directive) for node in nodes if job.member(node) is not None)
