"""Checkpoints in the job's machine: from the ranks' parts to an entry in the ledger. Pure; ``job.step`` calls it.

A checkpoint exists when all ranks have written their parts, rank 0's node has put them together and read them back, and
the ledger has taken it. Whatever comes from another generation than the one that runs is dropped, so that a late save
never becomes the newest one.

Where ranks are asked to save, they agree on the step without a collective: first each is told to wait at its next step,
and each node says how far its workers can have got by then; the largest of these is the step at which all save.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from elastic_adapter.core.errors import assert_never
from elastic_adapter.core.events import (
    CheckpointEntered,
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
from elastic_adapter.core.ledger import Ask, Save, Saves, Stage
from elastic_adapter.core.model import CheckpointRef, Part, Pause, Prepare, Publish, SaveAt, World
from elastic_adapter.core.state import Job, Running

Step: TypeAlias = tuple[Job, tuple[Command, ...]]
SaveEvent: TypeAlias = (
    CheckpointerOpened | StepsReached | ShardReported | CheckpointPrepared | CheckpointEntered | CheckpointPublished
)
# How long nodes may take to say how far their workers are.
_ANSWER_S = 5.0
# When a ledger that could not be reached is asked again.
_AGAIN_S = 1.0
# When ranks that were asked to save, and did not, may be asked again.
_STALE_S = 600.0
# How many checkpoints the ledger knows.
_KEPT = 64


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
        *_to_all(job, world, Pause(world.generation, number, reason)),
    )


def call_off(job: Job, why: str) -> Step:
    """Nobody need wait for a save that was asked for: all go on."""
    world, number = job.world, job.saves.asked + 1
    assert world is not None
    job = replace(job, saves=replace(job.saves, ask=None, asked=number))
    return job, _to_all(job, world, SaveAt(world.generation, number, None, hold=False, reason=why))


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
        case CheckpointerOpened(node=node, rank=rank):
            known = rank in world.ranks(node)
            return (replace(job, saves=_with_saver(job.saves, rank)) if known else job), ()
        case StepsReached():
            return _reached(job, event, world)
        case ShardReported():
            return _shard(job, event, world)
        case CheckpointPrepared():
            return _prepared(job, event, now)
        case CheckpointEntered():
            return _entered(job, event, world, now)
        case CheckpointPublished():
            return _published(job, event)
        case _:
            assert_never(event)


def time_passed(job: Job, now: float) -> Step:
    """What a deadline of checkpoints asks for, if one is over."""
    saves = job.saves
    if saves.ask is not None and saves.ask.step is None and now >= saves.ask.until:
        missing = ", ".join(sorted(set(job.world.nodes if job.world else ()) - {node for node, _ in saves.ask.bounds}))
        after, commands = call_off(job, "nodes did not answer")
        return after, (
            Tell(f"no checkpoint: {missing} did not say in time where its workers are", "checkpoint"),
            *commands,
        )
    again = next((each for each in saves.under_way if each.enter_at is not None and now >= each.enter_at), None)
    return _enter(job, again, now) if again is not None else (job, ())


def is_busy(job: Job, now: float) -> bool:
    """Whether ranks were asked to save, so that there is no need to ask them. Where nothing came of it, there is."""
    ask = job.saves.ask
    return ask is not None and now < ask.until + _STALE_S


def has_staged(job: Job, node: str) -> bool:
    """Whether all ranks of a node have done what they were asked to."""
    world, ask = job.world, job.saves.ask
    if world is None or ask is None or ask.step is None:
        return False
    save = job.saves.find(ask.step)
    return save is not None and save.staged.issuperset(world.ranks(node))


def orders(job: Job) -> tuple[Prepare | Publish, ...]:
    """What rank 0's node is to do, and has not said that it has."""
    generation = job.world.generation if job.world is not None else 0
    kinds: dict[Stage, type[Prepare | Publish]] = {Stage.PREPARING: Prepare, Stage.PUBLISHING: Publish}
    return tuple(kinds[each.stage](generation, each.step) for each in job.saves.under_way if each.stage in kinds)


def entries(job: Job) -> tuple[CheckpointRef, ...]:
    """The ledger with the checkpoint that it was asked to take, if it has not answered: that may be there already."""
    entering = next((each for each in job.saves.under_way if each.is_entering), None)
    return job.checkpoints if entering is None else _with_entry(job, entering)


def _with_saver(saves: Saves, rank: int) -> Saves:
    return replace(saves, savers=saves.savers | {rank})


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
    return replace(job, saves=replace(job.saves, ask=found)), _to_all(job, world, directive)


def _shard(job: Job, event: ShardReported, world: World) -> Step:
    shard, saves = event.shard, job.saves
    if shard.rank not in world.ranks(event.node) or _is_over(job, world, shard.step):
        return job, ()
    known = saves.find(shard.step) or Save(shard.step)
    if known.stage is not Stage.WRITING or shard.rank in known.written:
        return job, ()
    if shard.part is Part.MISSED:
        words = f"no checkpoint of step {shard.step}: rank {shard.rank} on {event.node}: {shard.why}"
        return replace(job, saves=saves.without(shard.step)), (Tell(words, "checkpoint"),)
    save = known.with_shard(shard)
    if save == known:
        return job, ()
    job = replace(job, saves=_with_saver(saves, shard.rank).with_save(save))
    return _all_written(job, save, world) if save.written.issuperset(range(world.world_size)) else (job, ())


def _is_over(job: Job, world: World, step: int) -> bool:
    """Whether it is too late for a part of this checkpoint: there is a later one, or it was given up."""
    later = any(each.generation == world.generation and each.step > step for each in job.checkpoints)
    return later or step in job.saves.settled


def _all_written(job: Job, save: Save, world: World) -> Step:
    entry = next(
        (each for each in job.checkpoints if (each.generation, each.step) == (world.generation, save.step)), None
    )
    if entry is not None:
        # Whoever led before had it entered, and did not hear that it has its name.
        save = replace(save, stage=Stage.PUBLISHING, uri=entry.uri)
        return replace(job, saves=job.saves.with_save(save)), _to_host(job, world, Publish(world.generation, save.step))
    save = replace(save, stage=Stage.PREPARING)
    return replace(job, saves=job.saves.with_save(save)), _to_host(job, world, Prepare(world.generation, save.step))


def _prepared(job: Job, event: CheckpointPrepared, now: float) -> Step:
    save = job.saves.find(event.step)
    if save is None or save.stage is not Stage.PREPARING:
        return job, ()
    if event.trouble:
        words = f"no checkpoint of step {event.step}: {event.trouble}"
        return replace(job, saves=job.saves.without(event.step)), (Tell(words, "checkpoint"),)
    return _enter(job, replace(save, uri=event.uri), now)


def _enter(job: Job, save: Save, now: float) -> Step:
    world = job.world
    assert world is not None
    save = replace(save, stage=Stage.ENTERING, enter_at=None)
    if any(each.is_entering and each.step != save.step for each in job.saves.under_way):
        # One after the other: what the ledger is to hold then is not known yet.
        return replace(job, saves=job.saves.with_save(replace(save, enter_at=now + _AGAIN_S))), ()
    job = replace(job, saves=job.saves.with_save(save))
    return job, (Enter(world.generation, save.step, _with_entry(job, save)),)


def _with_entry(job: Job, save: Save) -> tuple[CheckpointRef, ...]:
    assert job.world is not None
    ref = CheckpointRef(save.step, job.world.generation, save.uri)
    return (ref, *(each for each in job.checkpoints if each != ref))[:_KEPT]


def _entered(job: Job, event: CheckpointEntered, world: World, now: float) -> Step:
    save = job.saves.find(event.step)
    if save is None or not save.is_entering:
        return job, ()
    if not event.entered:
        return replace(job, saves=job.saves.with_save(replace(save, enter_at=now + _AGAIN_S))), ()
    saves = job.saves.with_save(replace(save, stage=Stage.PUBLISHING))
    # The newest is the first: an earlier one that is not in the ledger by now comes too late.
    late = (each.step for each in saves.under_way if each.step < save.step and each.stage is not Stage.PUBLISHING)
    # Who asked for such a one has an answer when this one has its name.
    saves = replace(saves.without(*late), ask=saves.ask)
    job = replace(job, saves=saves, checkpoints=_with_entry(job, save))
    return job, _to_host(job, world, Publish(world.generation, save.step))


def _published(job: Job, event: CheckpointPublished) -> Step:
    save = job.saves.find(event.step)
    if save is None or save.stage is not Stage.PUBLISHING:
        return job, ()
    # What ranks staged before it and did not finish, they will not finish any more.
    over = {each.step for each in job.saves.under_way if each.step <= event.step}
    asked = job.saves.ask.step if job.saves.ask is not None else None
    over |= {asked} if asked is not None and asked <= event.step else set()
    kept = tuple(each for each in job.checkpoints if each.name not in event.pruned)
    words = f"checkpoint of step {event.step} is committed: {save.uri}"
    if event.trouble:
        words = f"{words}; it could not be given its name: {event.trouble}"
    return replace(job, saves=job.saves.without(*sorted(over)), checkpoints=kept), (Tell(words, "checkpoint"),)


def _to_host(job: Job, world: World, directive: Prepare | Publish) -> tuple[Command, ...]:
    """To rank 0's node; if it is away, it is told when it comes back."""
    host = world.nodes[0]
    return (Send(host, directive),) if job.member(host) is not None else ()


def _to_all(job: Job, world: World, directive: Pause | SaveAt) -> tuple[Command, ...]:
    return tuple(Send(node, directive) for node in world.nodes if job.member(node) is not None)
