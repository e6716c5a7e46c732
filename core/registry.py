"""The registry of a job in etcd: who takes part, who leads, what is committed.

    <base>/run                        the job's root: its create revision, and a nonce, are the run's id
    <base>/runs/<id>/head/leader      who leads, under its lease; its modification revision is the epoch
    <base>/runs/<id>/head/generation  the last generation committed: small, watched by all agents
    <base>/runs/<id>/members/<node>   one per agent, under its lease
    <base>/runs/<id>/record           the world, the budget spent and the outcome
    <base>/runs/<id>/events/<n>       what happened, for people
    <base>/runs/<id>/finished         there for a short while after the run's end

The root and all that is committed are under a lease of the run, which every agent keeps alive: what a run leaves
behind whose nodes all died goes by itself, long after any of them could still be at work.

A leader's key is written once, by its campaign or by deposing the one before it, so that its modification revision is
as good as a create revision, and a succession is one transaction: etcd refuses to delete and put a key in one.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from urllib.parse import quote, unquote

from elastic_adapter.core.codec import (
    Card,
    Root,
    card_from_bytes,
    card_to_bytes,
    note_from_bytes,
    note_to_bytes,
    record_from_bytes,
    record_to_bytes,
    root_from_bytes,
    root_to_bytes,
)
from elastic_adapter.core.errors import Fenced, OutOfReach, RunOver, UserError
from elastic_adapter.core.etcd import (
    AnswerLost,
    Change,
    Compacted,
    Compare,
    Etcd,
    EtcdUnavailable,
    Item,
    Lease,
    RequestOp,
    Snapshot,
    created_at,
    delete,
    delete_prefix,
    modified_at,
    put,
    read,
    value_is,
)
from elastic_adapter.core.model import Outcome
from elastic_adapter.core.ports import Leader, Note, Record, missed

BASE = "/elastic-adapter"
_ATTEMPTS = 20
_RUN_RENEWALS = 10
# Of one leader's notes, so many are kept.
_NOTES = 1000
_PAUSE_S = 0.05
_NO_ANSWER = "etcd's answers were lost again and again"


@dataclass(frozen=True, slots=True)
class Ended:
    """The job's run is over, a short while ago."""

    run: int
    outcome: Outcome
    at: float


@dataclass(frozen=True, slots=True)
class Entered:
    """The run to take part in."""

    run: int
    token: str


@dataclass(frozen=True, slots=True)
class Abandoned:
    """A run that was never ended, and nobody is there. Whoever was in its world may be dead, or only cut off."""

    run: int
    # Where the agents of its last world listened, by node.
    agents: Mapping[str, str]
    entered: Entered


@dataclass(frozen=True, slots=True)
class NodeTaken:
    """Another agent has this node's name."""

    card: Card
    revision: int


@dataclass(frozen=True, slots=True)
class Head:
    """What all agents watch."""

    leader: Leader | None
    generation: int
    revision: int


@dataclass(frozen=True, slots=True)
class _Alive:
    """Somebody takes part in the run."""


@dataclass(frozen=True, slots=True)
class _Empty:
    """Nobody has registered yet, or everybody went before the first world."""


@dataclass(frozen=True, slots=True)
class _Over:
    """The run ended a while ago."""


@dataclass(frozen=True, slots=True)
class _Left:
    """It has a world and no members: where that world's agents listened."""

    agents: dict[str, str]


class EtcdRegistry:
    """One job, as one agent sees it. ``enter`` a run, then ``register``, then take part."""

    def __init__(
        self,
        etcd: Etcd,
        job_id: str,
        me: Card,
        *,
        finished_grace_s: float = 10.0,
        retention_s: float = 3600.0,
        abandoned_s: float = 7200.0,
    ) -> None:
        self.me = me
        self._etcd = etcd
        # How long the keys of a run stay when none of its agents is heard of.
        self._abandoned_s = abandoned_s
        self._finished_grace_s = finished_grace_s
        self._retention_s = retention_s
        self._base = f"{BASE}/{quote(job_id, safe='')}"
        self._root = f"{self._base}/run"
        self._run = 0
        self._root_value = b""
        self._nonce = ""
        self._run_lease = 0
        self._lease = Lease(0, 0)
        # The revision at which the record was last written, so far as we know; None: it may be another one.
        self._written: int | None = None

    @property
    def run(self) -> int:
        return self._run

    @property
    def run_id(self) -> str:
        """What tells this run from all others of the job."""
        return f"{self._run}-{self._nonce}"

    def key(self, name: str) -> str:
        return f"{self._base}/runs/{self.run_id}/{name}"

    @property
    def _ours(self) -> list[Compare]:
        """Holds while the job's run is the one that we entered, in an etcd that still knows it."""
        return [created_at(self._root, self._run), value_is(self._root, self._root_value)]

    @property
    def _leader(self) -> str:
        return self.key("head/leader")

    @property
    def _generation(self) -> str:
        return self.key("head/generation")

    @property
    def _record(self) -> str:
        return self.key("record")

    def _member(self, node: str) -> str:
        return self.key(f"members/{quote(node, safe='')}")

    # Which run.

    async def enter(self, settings: Mapping[str, str], token: str) -> Entered | Abandoned | Ended:
        """Find the job's run, or begin one. Raises UserError when its settings are not ours."""
        async for _ in self._attempts():
            found = (await self._etcd.get(self._root)).items
            if not found:
                await self._begin(Root(dict(settings), token, secrets.token_hex(4), self.me.node, time.time()))
                continue
            root = self._adopt(found[0])
            state, entered = await self._look(), Entered(self._run, root.token)
            match state:
                case _Alive():
                    self._check(root, settings)
                    return entered
                case _Empty() if root.settings == dict(settings):
                    return entered
                case Ended() if self._finished_grace_s > 0 and root.settings == dict(settings):
                    return state
                case _Empty() | _Over() | Ended():
                    # Other settings than those of a run that just ended, or no grace: no late node of that run.
                    await self.discard()
                case _Left(agents=agents):
                    return Abandoned(self._run, agents, entered)
        raise EtcdUnavailable(_NO_ANSWER)

    async def find(self) -> Root | None:
        """Look at the job's run without taking part; None: there is none."""
        found = (await self._etcd.get(self._root)).items
        if not found:
            return None
        return self._adopt(found[0])

    def _adopt(self, item: Item) -> Root:
        """Mean the run of this root from now on."""
        root = root_from_bytes(item.value)
        self._run, self._root_value, self._nonce = item.created, item.value, root.nonce
        self._run_lease = item.lease
        return root

    async def _begin(self, root: Root) -> None:
        lease = await self._etcd.grant(max(1, round(self._abandoned_s)))
        try:
            await self._etcd.transact([created_at(self._root, 0)], [put(self._root, root_to_bytes(root), lease.id)])
        except AnswerLost:
            # Whatever happened is read next.
            return

    async def _look(self) -> _Alive | _Empty | _Over | _Left | Ended:
        prefix = self.key("")
        items = {item.key.removeprefix(prefix): item for item in (await self._etcd.get_prefix(prefix)).items}
        record = record_from_bytes(items["record"].value) if "record" in items else Record()
        if record.outcome is not None:
            return Ended(self._run, record.outcome, record.ended_at or 0.0) if "finished" in items else _Over()
        if "head/leader" in items or any(key.startswith("members/") for key in items):
            return _Alive()
        if record.world is None:
            return _Empty()
        return _Left({each.node: each.control for each in record.world.placements})

    def _check(self, root: Root, settings: Mapping[str, str]) -> None:
        both = dict.fromkeys((*settings, *root.settings))
        names = [name for name in both if root.settings.get(name) != settings.get(name)]
        if names:
            raise UserError(
                f"node {self.me.node} has {_listed(settings, names)}, but this job was started by node {root.node} "
                f"with {_listed(root.settings, names)}: start all with the same settings, or with another --rdzv-id"
            )

    def confirm(self, settings: Mapping[str, str]) -> None:
        """Check our settings against those of an abandoned run that we take part in after all."""
        self._check(root_from_bytes(self._root_value), settings)

    async def discard(self) -> None:
        """Remove a run that is over, unless somebody leads it meanwhile."""
        compare = [*self._ours, created_at(self._leader, 0)]
        try:
            await self._etcd.transact(compare, [delete(self._root), delete_prefix(self.key(""))])
        except AnswerLost:
            return

    async def keep_run(self) -> None:
        """Say that somebody takes part in the run, often enough that its keys stay."""
        while True:
            with contextlib.suppress(OutOfReach):
                await self._etcd.keep_alive(self._run_lease)
            await asyncio.sleep(self._abandoned_s / _RUN_RENEWALS)

    async def check_run(self) -> None:
        """Raise RunOver when the job has another run now, or none."""
        found = (await self._etcd.get(self._root)).items
        if not found:
            raise RunOver("etcd does not know this run of the job: it has lost its data", replaced=False)
        if found[0].created == self._run and found[0].value == self._root_value:
            return
        if found[0].created > self._run:
            raise RunOver(f"a newer run ({found[0].created}) of this job has begun", replaced=True)
        raise RunOver("etcd has lost its data, and another run of this job was begun in it", replaced=True)

    # Members.

    async def register(self, lease: Lease) -> int | NodeTaken:
        """Become a member under this lease; the order in which we came. Raises RunOver."""
        self._lease = lease
        key = self._member(self.me.node)
        async for _ in self._attempts():
            try:
                answer = await self._etcd.transact(
                    [*self._ours, created_at(key, 0)],
                    [put(key, card_to_bytes(self.me), lease.id)],
                    [read(key)],
                )
            except AnswerLost:
                continue
            if answer.succeeded:
                return answer.revision
            found = answer.reads[0].items
            if not found:
                await self.check_run()
                continue
            card = card_from_bytes(found[0].value)
            if card.incarnation != self.me.incarnation:
                return NodeTaken(card, found[0].modified)
            if found[0].lease == lease.id:
                return found[0].created
            await self.take_over(found[0].modified)
        raise EtcdUnavailable(_NO_ANSWER)

    async def take_over(self, revision: int) -> bool:
        """Write our own card over one that was last written at this revision."""
        key = self._member(self.me.node)
        try:
            answer = await self._etcd.transact(
                [*self._ours, modified_at(key, revision)],
                [put(key, card_to_bytes(self.me), self._lease.id)],
            )
        except AnswerLost:
            return False
        return answer.succeeded

    def rename(self, node: str) -> None:
        self.me = replace(self.me, node=node)

    async def members(self) -> tuple[frozenset[str], int]:
        """Who has a living lease, and the revision of which that is true."""
        found = await self._etcd.get_prefix(self.key("members/"))
        return frozenset(card_from_bytes(item.value).node for item in found.items), found.revision

    async def cards(self) -> tuple[Card, ...]:
        """Of those who have a living lease, in the order in which they came."""
        found = await self._etcd.get_prefix(self.key("members/"))
        return tuple(card_from_bytes(item.value) for item in sorted(found.items, key=lambda item: item.created))

    async def presence(self, members: frozenset[str], after: int) -> AsyncIterator[tuple[str, bool]]:
        """The nodes whose member key is written (True) or deleted, as it happens, from what ``members`` found on."""
        known = {self._member(node) for node in members}
        async for change in self._changes(self.key("members/"), after, known):
            yield unquote(change.item.key.rpartition("/")[2]), not change.deleted

    # Leadership.

    async def campaign(self, node: str, address: str) -> Leader:
        """Become the leader if there is none; either way, say who leads. Raises RunOver."""
        card = Card(node, address, self.me.incarnation)
        async for _ in self._attempts():
            try:
                answer = await self._etcd.transact(
                    [*self._ours, created_at(self._leader, 0)],
                    [put(self._leader, card_to_bytes(card), self._lease.id)],
                    [read(self._leader)],
                )
            except AnswerLost:
                continue
            if answer.succeeded:
                return Leader(node, address, answer.revision)
            found = answer.reads[0].items
            if found:
                return _leader(found[0])
            await self.check_run()
        raise EtcdUnavailable(_NO_ANSWER)

    async def _attempts(self) -> AsyncIterator[int]:
        """A few tries, with a pause between them: an etcd that refuses at once must not be flooded."""
        for attempt in range(_ATTEMPTS):
            yield attempt
            await asyncio.sleep(_PAUSE_S)

    async def depose(self, leader: Leader, address: str) -> Leader:
        """Lead in place of a leader that is dead, and remove its member key with it; or say who leads instead."""
        card = Card(self.me.node, address, self.me.incarnation)
        theirs = self._member(leader.node)
        async for _ in self._attempts():
            now = await self.leader()
            if now is None or now.epoch != leader.epoch:
                return await self.campaign(self.me.node, address)
            found = (await self._etcd.get(theirs)).items
            revision = found[0].modified if found else 0
            compare = [modified_at(self._leader, leader.epoch), modified_at(theirs, revision)]
            # Its node's agent may have been started anew: that one's card is not the dead leader's.
            dead = found and card_from_bytes(found[0].value).control == leader.address
            try:
                answer = await self._etcd.transact(
                    compare,
                    [put(self._leader, card_to_bytes(card), self._lease.id), *([delete(theirs)] if dead else [])],
                )
            except AnswerLost:
                continue
            if answer.succeeded:
                return Leader(card.node, card.control, answer.revision)
        raise EtcdUnavailable(_NO_ANSWER)

    async def leader(self) -> Leader | None:
        found = (await self._etcd.get(self._leader)).items
        return _leader(found[0]) if found else None

    async def resign(self, epoch: int) -> None:
        """Lead no longer, so that another can at once."""
        await self._etcd.transact([modified_at(self._leader, epoch)], [delete(self._leader)])

    # The record.

    async def load(self) -> Record:
        found = (await self._etcd.get(self._record)).items
        self._written = found[0].modified if found else 0
        return record_from_bytes(found[0].value) if found else Record()

    async def commit(self, epoch: int, record: Record, *, after: int) -> None:
        operations = await self._operations(record, after)
        ours = [modified_at(self._leader, epoch), self._generation_is(after)]
        async for _ in self._attempts():
            # A write that was sent before, and whose answer was lost, may still be on its way: it will not find the
            # record as it was, and do nothing.
            written = self._written if self._written is not None else await self._look_at_record()
            self._written = None
            answer = await self._etcd.transact(
                [*ours, modified_at(self._record, written)],
                operations,
                [read(key) for key in (self._leader, self._generation, self._record)],
            )
            if answer.succeeded:
                self._written = answer.revision
                return
            leader, generation, found = answer.reads
            await self._check_leading(epoch, leader)
            if found.items and found.items[0].value == record_to_bytes(record):
                # It was tried before, and done; its answer was lost.
                return
            now = int(generation.items[0].value) if generation.items else 0
            if now != after:
                raise Fenced(epoch, epoch, missed(after, now))
        raise EtcdUnavailable(_NO_ANSWER)

    async def _operations(self, record: Record, after: int) -> list[RequestOp]:
        """What a commit writes. What is left of a run that has ended goes by itself, some time later."""
        generation, lease, operations = record.generation, self._run_lease, []
        if record.outcome is not None:
            lease = (await self._etcd.grant(max(1, round(self._retention_s)))).id
            root = (await self._etcd.get(self._root)).items
            operations += [put(self._root, item.value, lease) for item in root if item.value == self._root_value]
            if self._finished_grace_s > 0:
                grace = await self._etcd.grant(max(1, round(self._finished_grace_s)))
                operations.append(put(self.key("finished"), b"", grace.id))
        if generation and (generation != after or record.outcome is not None):
            operations.append(put(self._generation, str(generation).encode(), lease))
        return [*operations, put(self._record, record_to_bytes(record), lease)]

    def _generation_is(self, number: int) -> Compare:
        """Holds while this is the generation committed last; 0: while there is none."""
        return value_is(self._generation, str(number).encode()) if number else created_at(self._generation, 0)

    async def _look_at_record(self) -> int:
        """When the record was last written; 0: never."""
        found = (await self._etcd.get(self._record)).items
        return found[0].modified if found else 0

    # Notes.

    async def note(self, epoch: int, notes: tuple[Note, ...]) -> None:
        operations = [put(self._event(each.epoch, each.number), note_to_bytes(each), self._run_lease) for each in notes]
        operations += [delete(self._event(each.epoch, each.number - _NOTES)) for each in notes if each.number > _NOTES]
        answer = await self._etcd.transact([modified_at(self._leader, epoch)], operations, [read(self._leader)])
        if not answer.succeeded:
            await self._check_leading(epoch, answer.reads[0])

    async def notes(self) -> tuple[Note, ...]:
        found = await self._etcd.get_prefix(self.key("events/"))
        return tuple(note_from_bytes(item.value) for item in found.items)

    def _event(self, epoch: int, number: int) -> str:
        """Such that the order of the keys is that of the notes."""
        return self.key(f"events/{epoch:016x}-{number:08d}")

    async def _check_leading(self, epoch: int, leader: Snapshot) -> None:
        """Raise Fenced where somebody else leads, or nobody."""
        current = leader.items[0].modified if leader.items else 0
        if current == epoch:
            return
        if not leader.items:
            await self._check_known()
        raise Fenced(epoch, current)

    async def _check_known(self) -> None:
        """An etcd that lost its data is as good as none: nobody leads in it."""
        try:
            await self.check_run()
        except RunOver as over:
            if not over.replaced:
                raise EtcdUnavailable(str(over)) from over

    # Watching.

    async def head(self) -> Head:
        prefix = self.key("head/")
        found = await self._etcd.get_prefix(prefix)
        items = {item.key.removeprefix(prefix): item for item in found.items}
        leader = _leader(items["leader"]) if "leader" in items else None
        generation = int(items["generation"].value) if "generation" in items else 0
        return Head(leader, generation, found.revision)

    async def heads(self, head: Head) -> AsyncIterator[Head]:
        """The head after each change, from this one on, without a gap."""
        prefix = self.key("head/")
        known = {self._leader} if head.leader is not None else set()
        async for change in self._changes(prefix, head.revision, known):
            name = change.item.key.removeprefix(prefix)
            if name == "leader":
                head = replace(head, leader=None if change.deleted else _leader(change.item))
            elif name == "generation" and not change.deleted:
                head = replace(head, generation=int(change.item.value))
            yield replace(head, revision=change.item.modified)

    async def _changes(self, prefix: str, after: int, known: set[str]) -> AsyncIterator[Change]:
        """Single changes. What was compacted before it was seen is made up for by what is there now."""
        while True:
            try:
                async for changes in self._etcd.watch(prefix, after):
                    for change in changes:
                        after = max(after, change.item.modified)
                        (known.discard if change.deleted else known.add)(change.item.key)
                        yield change
            except Compacted:
                found = await self._etcd.get_prefix(prefix)
                after = found.revision
                there = {item.key for item in found.items}
                for key in known - there:
                    yield Change(Item(key, b"", 0, found.revision, 0), deleted=True)
                for item in found.items:
                    yield Change(item, deleted=False)
                known = there


def _listed(settings: Mapping[str, str], names: list[str]) -> str:
    return ", ".join(f"--{name} {settings.get(name) or 'not set'}" for name in names)


def _leader(item: Item) -> Leader:
    card = card_from_bytes(item.value)
    return Leader(card.node, card.control, item.modified)
