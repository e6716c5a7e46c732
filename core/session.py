"""An agent's tie to its coordinator, as the agent sees it; and the simplest one: the coordinator is in this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from elastic_adapter.core.client import Link
from elastic_adapter.core.errors import LinkBroken
from elastic_adapter.core.events import MemberJoined, MemberLeaving, StopRequested
from elastic_adapter.core.model import Directive, Halt
from elastic_adapter.core.wire import Report


@dataclass(frozen=True, slots=True)
class LinkLost:
    """There is no coordinator any more, and there will be none."""

    why: str


@dataclass(frozen=True, slots=True)
class Superseded:
    """A later generation was committed: workers of an earlier one must end, whatever the coordinator says."""

    generation: int


@dataclass(frozen=True, slots=True)
class CutOff:
    """Workers must end now, and be dead by ``kill_by`` (monotonic)."""

    kill_by: float
    why: str


Notice: TypeAlias = Directive | LinkLost | Superseded | CutOff


class Node(Protocol):
    """What a session needs of its agent."""

    def state(self) -> MemberJoined:
        """All that a coordinator must know of this node."""
        ...

    def request(self) -> StopRequested | MemberLeaving | None:
        """What a signal asked for, if one came."""
        ...

    def notice(self, notice: Notice) -> None:
        """Take a directive, or news of the tie itself."""
        ...


class Session(Protocol):
    @property
    def order(self) -> int:
        """The place in the queue of those who joined; 0: the coordinator counts."""
        ...

    @property
    def control(self) -> str:
        """Where this agent listens; empty where nobody asks."""
        ...

    async def attend(self, node: Node) -> None:
        """Stay in touch until cancelled."""
        ...

    async def report(self, report: Report) -> None:
        """Tell whoever leads. What can't be told now is part of the node's state, and told with that."""
        ...


async def converse(link: Link, node: Node) -> bool:
    """Pass on directives until the stream ends; whether the last one was to halt. Raises LinkBroken."""
    async for directive in link.directives():
        node.notice(directive)
        if isinstance(directive, Halt):
            return True
    return False


class LocalSession:
    """One node: the coordinator is in this process, and its end is the end."""

    order = 0
    control = ""

    def __init__(self, address: str) -> None:
        self._link = Link(address)

    async def attend(self, node: Node) -> None:
        why = "it ended the stream"
        try:
            state, request = node.state(), node.request()
            await self._link.attach(state)
            if request is not None:
                await self._link.report(request)
            if await converse(self._link, node):
                return
        except LinkBroken as error:
            why = str(error)
        node.notice(LinkLost(f"the coordinator is gone: {why}"))

    async def report(self, report: Report) -> None:
        await self._link.report(report)

    async def close(self) -> None:
        await self._link.close()
