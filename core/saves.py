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
    match event:
        case CheckpointerOpened(node=node, rank=rank):
            known = rank in world.ranks(node)
            return (replace(job, saves=_with_saver(job.saves, rank)) if known else job), ()
        case StepsReached():
            return _reached(job, event, world)
        case ShardReported():
            return _shard(job, event, world)
        case CheckpointPrepared():
            return _prepared(job, event)
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
    return _enter(job, again) if again is not None else (job, ())


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
    if shard.rank not in world.ranks(event.node):
        return job, ()
    if shard.part is Part.MISSED:
        words = f"no checkpoint of step {shard.step}: rank {shard.rank} on {event.node}: {shard.why}"
        return replace(job, saves=saves.without(shard.step)), (Tell(words, "checkpoint"),)
    known = saves.find(shard.step) or Save(shard.step)
    save = known.with_shard(shard)
    if save == known or save.stage is not Stage.WRITING:
        return job, ()
    commands: tuple[Command, ...] = ()
    if save.written.issuperset(range(world.world_size)):
        save = replace(save, stage=Stage.PREPARING)
        commands = (Send(world.nodes[0], Prepare(world.generation, save.step)),)
    return replace(job, saves=_with_saver(saves, shard.rank).with_save(save)), commands


def _prepared(job: Job, event: CheckpointPrepared) -> Step:
    save = job.saves.find(event.step)
    if save is None or save.stage is not Stage.PREPARING:
        return job, ()
    if event.trouble:
        words = f"no checkpoint of step {event.step}: {event.trouble}"
        return replace(job, saves=job.saves.without(event.step)), (Tell(words, "checkpoint"),)
    return _enter(job, replace(save, uri=event.uri))


def _enter(job: Job, save: Save) -> Step:
    assert job.world is not None
    save = replace(save, stage=Stage.ENTERING, enter_at=None)
    ref = CheckpointRef(save.step, job.world.generation, save.uri)
    checkpoints = (ref, *job.checkpoints)[:_KEPT]
    return replace(job, saves=job.saves.with_save(save)), (Enter(job.world.generation, save.step, checkpoints),)


def _entered(job: Job, event: CheckpointEntered, world: World, now: float) -> Step:
    save = job.saves.find(event.step)
    if save is None or save.stage is not Stage.ENTERING:
        return job, ()
    if not event.entered:
        return replace(job, saves=job.saves.with_save(replace(save, enter_at=now + _AGAIN_S))), ()
    ref = CheckpointRef(save.step, world.generation, save.uri)
    saves = job.saves.with_save(replace(save, stage=Stage.PUBLISHING))
    job = replace(job, saves=saves, checkpoints=(ref, *job.checkpoints)[:_KEPT])
    return job, (Send(world.nodes[0], Publish(world.generation, save.step)),)


def _published(job: Job, event: CheckpointPublished) -> Step:
    save = job.saves.find(event.step)
    if save is None or save.stage is not Stage.PUBLISHING:
        return job, ()
    # What ranks staged before it and did not finish, they will not finish any more.
    over = tuple(each.step for each in job.saves.under_way if each.step <= event.step)
    kept = tuple(each for each in job.checkpoints if each.name not in event.pruned)
    words = f"checkpoint of step {event.step} is committed: {save.uri}"
    if event.trouble:
        words = f"{words}; it could not be given its name yet: {event.trouble}"
    return replace(job, saves=job.saves.without(*over), checkpoints=kept), (Tell(words, "checkpoint"),)


def _to_all(job: Job, world: World, directive: Pause | SaveAt) -> tuple[Command, ...]:
    return tuple(Send(node, directive) for node in world.nodes if job.member(node) is not None)
