"""A node among others, which meet in etcd: its lease, its tie to the leader, and leading when it falls to this node."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import replace

from elastic_adapter.core.client import Link
from elastic_adapter.core.config import JobConfig
from elastic_adapter.core.coordinator import Coordinator
from elastic_adapter.core.errors import Fenced, LinkBroken, NotLeading, OutOfReach, RunOver, UserError
from elastic_adapter.core.etcd import Etcd, Lease
from elastic_adapter.core.isolation import Contact, stop
from elastic_adapter.core.lease import LeaseKeeper
from elastic_adapter.core.model import Endpoint
from elastic_adapter.core.ports import Leader
from elastic_adapter.core.probe import probe
from elastic_adapter.core.registry import Abandoned, Ended, EtcdRegistry, Head, NodeTaken
from elastic_adapter.core.server import Server
from elastic_adapter.core.session import CutOff, LinkLost, Node, Superseded, converse
from elastic_adapter.core.succession import Answer, Ask, Broken, Depose, Resign, Wait, next_move
from elastic_adapter.core.waiting import all_of
from elastic_adapter.core.wire import Report

log = logging.getLogger(__name__)

_ATTACH_S = 2.0
_RETRY_S = 0.2
# How long a coordinator that goes in good order waits until all have heard its last words.
_LAST_WORDS_S = 3.0
# An agent that has had no contact to etcd for this time longer than the isolation timeout gives up.
GIVE_UP_S = 600.0
# An etcd of the job's own that crashed is back sooner than this.
_EMBEDDED_S = 10.0
# How often it is said that etcd is out of reach.
_SAY_AGAIN_S = 60.0
# How long a node's name may be held by an agent that does not answer: its lease, and what etcd takes to notice.
_NAME_S = 3.0


class ClusterSession:
    """``join`` a run, ``attend`` it, ``close``."""

    def __init__(
        self,
        config: JobConfig,
        registry: EtcdRegistry,
        lease_etcd: Etcd,
        *,
        address: str,
        listen: str,
        embedded: bool = False,
    ) -> None:
        self.order = 0
        self.control = ""
        self._config = config
        self._etcd = lease_etcd
        self._registry = registry
        self._keeper = LeaseKeeper(lease_etcd, config.lease_s, self._register, registry.check_run, self._look_again)
        self._address = address
        self._listen = listen
        # Whether etcd is run by a node of the job: one that is gone for long does not come back with its data.
        self._embedded = embedded
        self._token = ""
        self._server: Server | None = None
        # Where reports go; and whether there is a stream, so far as we know.
        self._link: Link | None = None
        self._linked = False
        self._head = Head(None, 0, 0)
        self._coordinator: Coordinator | None = None
        self._leading: asyncio.Task[None] | None = None
        # Which of our leases the leadership is under.
        self._led_under = 0
        # Set when something about our ties is different.
        self._changed = asyncio.Event()
        self._head_changed = asyncio.Event()
        self._cut_off = False
        # What was last said of etcd, and when it is said again.
        self._said = ""
        self._say_at = 0.0

    @property
    def node(self) -> str:
        return self._registry.me.node

    # Joining.

    async def join(self, settings: Mapping[str, str], token: str, *, guessed: bool) -> Ended | None:
        """Enter the job's run and become a member; the run's end, if it is over. Raises UserError, OutOfReach."""
        while True:
            entered = await self._registry.enter(settings, token)
            if isinstance(entered, Ended):
                return entered
            if isinstance(entered, Abandoned):
                if await self._all_dead(entered):
                    log.info("run %d of this job was left without an end, and nobody is alive of it", entered.run)
                    await self._registry.discard()
                    continue
                self._registry.confirm(settings)
                entered = entered.entered
            await self._start_server(entered.token)
            try:
                await self._enrol(guessed=guessed)
            except RunOver:
                continue
            log.info("run %d: this node is a member, listening at %s", entered.run, self.control)
            return None

    async def _all_dead(self, run: Abandoned) -> bool:
        answers = await asyncio.gather(*(probe(control) for control in run.agents.values() if control))
        return all(answer is Answer.REFUSED for answer in answers)

    async def _start_server(self, token: str) -> None:
        if self._server is not None:
            await self._server.stop()
        self._token = token
        try:
            self._server = Server(str(Endpoint(self._listen, 0)), token)
        except RuntimeError as error:
            raise UserError(
                f"this agent can't listen at {self._listen}: is it an address of this machine? "
                "(--local-addr, POD_IP; or --listen-address to listen elsewhere)"
            ) from error
        await self._server.start()
        self.control = str(Endpoint(self._address, self._server.port))
        self._registry.me = replace(self._registry.me, control=self.control)

    async def _enrol(self, *, guessed: bool) -> None:
        sent = time.monotonic()
        lease = await self._etcd.grant(self._config.lease_s)
        end = time.monotonic() + lease.ttl_s + _NAME_S
        name, number = self.node, 1
        while True:
            answer = await self._registry.register(lease)
            if isinstance(answer, int):
                break
            holder = await probe(answer.card.control)
            if holder is Answer.REFUSED:
                # Whoever had this name is dead: we are in its place.
                await self._registry.take_over(answer.revision)
            elif holder is Answer.OPEN and guessed:
                number += 1
                self._registry.rename(f"{name}-{number}")
            elif holder is Answer.OPEN or time.monotonic() > end:
                raise UserError(
                    f"node {name} is already taken by an agent at {answer.card.control}: "
                    f"give this one another --node-id, or stop that one"
                )
            else:
                await asyncio.sleep(_RETRY_S)
                sent = time.monotonic()
                await self._etcd.keep_alive(lease.id)
        self.order = answer
        self._keeper.adopt(lease, sent)

    async def _register(self, lease: Lease) -> None:
        """Register again: the lease before has ended while we were not looking."""
        answer = await self._registry.register(lease)
        if isinstance(answer, NodeTaken):
            raise RunOver(f"an agent at {answer.card.control} has taken this node's name", replaced=True)
        self.order = answer
        log.warning("the lease of this node had ended: registered anew")

    # What the agent uses.

    async def attend(self, node: Node) -> None:
        await all_of(
            self._keeper.keep(),
            self._registry.keep_run(),
            self._watch_head(node),
            self._watch_ties(node),
            self._stay_linked(node),
        )

    async def report(self, report: Report) -> None:
        if self._link is not None:
            await self._link.report(report)

    async def close(self) -> None:
        """Go in good order: others may lead at once, and have heard our last words."""
        if self._coordinator is not None:
            # Only who leads may write them down.
            await self._coordinator.notes_written()
        if self._keeper.lease.id:
            with contextlib.suppress(OutOfReach, asyncio.TimeoutError):
                await asyncio.wait_for(self._etcd.revoke(self._keeper.lease.id), 1.0)
        if self._coordinator is not None:
            await self._coordinator.close(_LAST_WORDS_S)
        await self._step_down()
        if self._server is not None:
            await self._server.stop()

    # Watching.

    def _look_again(self) -> None:
        self._changed.set()

    async def _watch_head(self, node: Node) -> None:
        """Follow who leads and which generation is committed, as etcd tells it."""
        while True:
            try:
                first = await self._registry.head()
                self._take_head(node, first)
                async for head in self._registry.heads(first):
                    self._take_head(node, head)
            except OutOfReach:
                await asyncio.sleep(_RETRY_S)

    def _take_head(self, node: Node, head: Head) -> None:
        self._head = head
        self._head_changed.set()
        self._changed.set()
        if head.generation:
            node.notice(Superseded(head.generation))

    async def _watch_ties(self, node: Node) -> None:
        """Say when this node is cut off, and step down where it leads no longer."""
        while True:
            self._changed.clear()
            self._tell_of_etcd()
            now = time.monotonic()
            due = self._judge(node, now)
            if self._coordinator is not None and not await self._still_leads(self._coordinator):
                await self._step_down()
            elif self._coordinator is not None and not self._keeper.answers:
                self._coordinator.registry_is_silent()
            if self._said:
                due = min(due, self._say_at)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), max(0.0, due - now))

    def _tell_of_etcd(self) -> None:
        words, now = self._trouble(), time.monotonic()
        if words != self._said or (words and now >= self._say_at):
            if words:
                log.warning("%s", words)
            elif self._said:
                log.info("etcd answers again")
            self._said, self._say_at = words, now + _SAY_AGAIN_S

    def _trouble(self) -> str:
        """What is wrong with etcd; empty: nothing."""
        keeper = self._keeper
        if keeper.answers or keeper.replaced is not None:
            return ""
        limit = f"workers that run go on, for at most {self._config.isolation_s:g} s (--isolation-timeout)"
        if keeper.forgot:
            return f"etcd does not know of this job, as if it had lost its data: nothing can be committed; {limit}"
        if self._embedded and not self._linked:
            return f"the node that runs the job's etcd is out of reach: without it the job ends in {_EMBEDDED_S:g} s"
        return f"etcd does not answer: nothing can be committed; {limit}"

    def _judge(self, node: Node, now: float) -> float:
        """Act on what our ties are like; when to look again."""
        keeper = self._keeper
        lost = self._embedded and not self._linked
        give_up = keeper.acked_at + (_EMBEDDED_S if lost else self._config.isolation_s + GIVE_UP_S)
        if keeper.replaced is not None:
            node.notice(LinkLost(str(keeper.replaced)))
        elif not keeper.answers and now >= give_up:
            whose = "the node that runs the job's etcd" if self._embedded else "etcd"
            node.notice(LinkLost(f"{whose} has been out of reach for {now - keeper.acked_at:.0f} s"))
            return now + GIVE_UP_S
        contact = Contact(
            linked=self._linked,
            etcd_answers=keeper.answers,
            acked_at=keeper.acked_at,
            lease_s=keeper.lease.ttl_s,
            isolation_s=self._config.isolation_s,
        )
        due = stop(contact, now)
        if due is None:
            self._cut_off = False
            return give_up if not keeper.answers else now + GIVE_UP_S
        if now < due.begin:
            return due.begin
        if not self._cut_off:
            self._cut_off = True
            node.notice(CutOff(due.kill_by, due.reason))
        return give_up

    # Following.

    async def _stay_linked(self, node: Node) -> None:
        """Attach to whoever leads; when that ends, find out who leads now, or lead."""
        broken: Broken | None = None
        while True:
            try:
                leader = await self._find_leader(broken)
                if leader is None:
                    await asyncio.sleep(_RETRY_S)
                    continue
                if leader.address == self.control:
                    await self._lead(leader)
            except (OutOfReach, RunOver):
                # The keeper of the lease sees the same, and more.
                await asyncio.sleep(_RETRY_S)
                continue
            ended = await self._follow(leader, node)
            if broken is not None and broken.epoch == ended.epoch:
                ended = replace(ended, had_stream=ended.had_stream or broken.had_stream)
            broken = ended

    async def _find_leader(self, broken: Broken | None) -> Leader | None:
        """Who leads now: ourselves, if nobody does, or if the one who did is dead. None: wait."""
        leader = await self._registry.campaign(self.node, self.control)
        same = broken is not None and leader.epoch == broken.epoch
        answer = await probe(leader.address) if same else None
        log.debug("leader is %s; before: %s; its port: %s", leader, broken, answer)
        match next_move(leader, self.control, broken, answer):
            case Ask():
                return leader
            case Wait():
                return None
            case Resign():
                await self._registry.resign(leader.epoch)
                return await self._registry.campaign(self.node, self.control)
            case Depose(reason=reason):
                now = await self._registry.depose(leader, self.control)
                if now.address == self.control:
                    log.warning("the leader %s is gone (%s): this node takes its place", leader.node, reason)
                return now

    async def _follow(self, leader: Leader, node: Node) -> Broken:
        """Stay attached to this leader for as long as it leads; how that ended."""
        link = Link(leader.address, self._token, leader.epoch)
        attached = answered_otherwise = False
        # What happens from now on is not in the state: it is told after it.
        self._link, state, request = link, node.state(), node.request()
        try:
            await link.attach(state, _ATTACH_S)
            attached = True
            self._tie(linked=True)
            if request is not None:
                await link.report(request)
            if await self._converse(link, node):
                # The end: whoever leads now, and whatever becomes of it, is no longer ours to care for.
                await asyncio.Event().wait()
        except NotLeading:
            answered_otherwise = True
        except LinkBroken as error:
            if attached:
                log.warning("the stream to the leader %s broke: %s", leader.node, error)
        finally:
            self._link = None
            await link.close()
        if attached:
            # Whether we are cut off is known only when etcd has been asked, too.
            await self._keeper.ask()
            self._tie(linked=False)
        else:
            await asyncio.sleep(_RETRY_S / 4)
        # It may have gone on leading in a later epoch meanwhile.
        return Broken(link.epoch, had_stream=attached, steps_down=answered_otherwise)

    async def _converse(self, link: Link, node: Node) -> bool:
        """Pass directives on, until the stream ends or etcd tells of a later leader; whether the last was to halt."""
        reading = asyncio.create_task(converse(link, node))
        try:
            while not reading.done():
                self._head_changed.clear()
                leader = self._head.leader
                if leader is not None and leader.epoch > link.epoch:
                    if leader.address != link.address:
                        return False
                    link.epoch = leader.epoch
                news = asyncio.create_task(self._head_changed.wait())
                await asyncio.wait({reading, news}, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
            return await reading
        finally:
            reading.cancel()

    def _tie(self, *, linked: bool) -> None:
        self._linked = linked
        self._changed.set()

    # Leading.

    async def _lead(self, leader: Leader) -> None:
        """Lead in this epoch, unless we do already."""
        if self._coordinator is not None:
            if self._coordinator.epoch == leader.epoch:
                return
            await self._step_down()
        assert self._server is not None
        count = self._keeper.count
        record = await self._registry.load()
        coordinator = Coordinator(self._config, self._registry, leader.epoch, record, lambda: self._keeper.answers)
        self._coordinator, self._led_under = coordinator, count
        self._server.serve(coordinator)
        log.info("this node leads the job (epoch %d, generation %d)", leader.epoch, record.generation)
        self._leading = asyncio.create_task(self._coordinate(coordinator))

    async def _coordinate(self, coordinator: Coordinator) -> None:
        watching = asyncio.create_task(self._watch_members(coordinator))
        try:
            await coordinator.lead()
        except Fenced as fenced:
            log.warning("this node no longer leads the job: %s", fenced)
        except OutOfReach as error:
            log.warning("this node can't lead the job: %s", error)
        finally:
            watching.cancel()
            if self._coordinator is coordinator:
                self._coordinator = None
                if self._server is not None:
                    self._server.serve(None)
            await coordinator.close()

    async def _watch_members(self, coordinator: Coordinator) -> None:
        """Tell the coordinator of leases that ended. Those of before our time get a full lease to come back."""
        while True:
            try:
                members, revision = await self._registry.members()
                gone = coordinator.job.absent - members
                waiting = asyncio.create_task(self._wait_for(coordinator, gone))
                try:
                    async for node, is_here in self._registry.presence(members, revision):
                        if is_here:
                            coordinator.lease_began(node)
                        elif node != self.node:
                            coordinator.lease_ended(node)
                finally:
                    waiting.cancel()
            except OutOfReach:
                await asyncio.sleep(_RETRY_S)

    async def _wait_for(self, coordinator: Coordinator, nodes: frozenset[str]) -> None:
        await asyncio.sleep(self._keeper.lease.ttl_s)
        for node in nodes & coordinator.job.absent:
            coordinator.lease_ended(node)

    async def _still_leads(self, coordinator: Coordinator) -> bool:
        """Whether we do. Our key went with the lease that ended: if nobody led in between, we go on where we were."""
        leader, count = self._head.leader, self._keeper.count
        if leader is not None and leader.epoch > coordinator.epoch:
            return False
        if count == self._led_under:
            return True
        try:
            leader = await self._registry.campaign(self.node, self.control)
            if leader.address != self.control or await self._registry.load() != coordinator.record:
                return False
        except (OutOfReach, RunOver):
            return True
        coordinator.epoch, self._led_under = leader.epoch, count
        log.info("this node leads on (epoch %d)", leader.epoch)
        return True

    async def _step_down(self) -> None:
        leading, self._leading = self._leading, None
        if leading is not None:
            leading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await leading
