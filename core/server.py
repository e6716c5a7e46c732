"""The gRPC side of the coordinator: it translates and hands on; it decides nothing."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc
import grpc.aio

from elastic_adapter.core.events import Event, MemberJoined, NodeCleared
from elastic_adapter.core.state import Job
from elastic_adapter.core.wire import EPOCH, TOKEN, hello_from_wire, is_pong, report_from_wire, status_to_wire
from elastic_adapter.proto import control_pb2 as pb
from elastic_adapter.proto import control_pb2_grpc as rpc

log = logging.getLogger(__name__)

Outbox = asyncio.Queue[pb.Directive | None]

# A peer that is silent although nothing ended its stream (stopped, or cut off) is noticed by unanswered pings.
_OPTIONS = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1500),
    ("grpc.http2.ping_timeout_ms", 1500),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 300),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
)


class Desk(Protocol):
    """What the server needs of a coordinator."""

    @property
    def epoch(self) -> int: ...

    @property
    def job(self) -> Job: ...

    def next_order(self) -> int: ...

    def attached(self, joined: MemberJoined, outbox: Outbox) -> None: ...

    def detached(self, node: str, outbox: Outbox) -> None: ...

    def answered(self, node: str) -> None: ...

    def post(self, event: Event) -> None: ...


class _Servicer(rpc.CoreServicer):
    def __init__(self, token: str) -> None:
        self.desk: Desk | None = None
        self._token = token

    async def Attach(  # noqa: N802 (the name is the protocol's)
        self, requests: AsyncIterator[pb.Report], context: grpc.aio.ServicerContext[pb.Report, pb.Directive]
    ) -> AsyncIterator[pb.Directive]:
        await self._admit(context)
        desk = await self._leading(context)
        first = await anext(requests, None)
        if first is None or first.WhichOneof("kind") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first report on a stream must be Hello")
            return
        joined = hello_from_wire(first, desk.next_order())
        outbox: Outbox = asyncio.Queue()
        await context.send_initial_metadata(((EPOCH, str(desk.epoch)),))
        desk.attached(joined, outbox)
        reader = asyncio.create_task(self._read(requests, desk, joined.member.node, outbox))
        try:
            while (directive := await outbox.get()) is not None:
                yield directive
        finally:
            reader.cancel()
            desk.detached(joined.member.node, outbox)

    async def Status(  # noqa: N802 (as above)
        self, _request: pb.StatusRequest, context: grpc.aio.ServicerContext[pb.StatusRequest, pb.StatusReply]
    ) -> pb.StatusReply:
        await self._admit(context)
        return status_to_wire((await self._leading(context)).job)

    async def Clear(  # noqa: N802 (as above)
        self, request: pb.ClearRequest, context: grpc.aio.ServicerContext[pb.ClearRequest, pb.ClearReply]
    ) -> pb.ClearReply:
        await self._admit(context)
        (await self._leading(context)).post(NodeCleared(request.node))
        return pb.ClearReply()

    async def _admit(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Only agents of this run know its token."""
        shown = dict(context.invocation_metadata() or ()).get(TOKEN, "")
        if not hmac.compare_digest(str(shown).encode(), self._token.encode()):
            log.warning("refused %s: it did not show the token of this run", context.peer())
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token of this run was not shown")

    async def _leading(self, context: grpc.aio.ServicerContext[Any, Any]) -> Desk:
        if self.desk is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this agent does not lead the job")
        assert self.desk is not None
        return self.desk

    async def _read(self, requests: AsyncIterator[pb.Report], desk: Desk, node: str, outbox: Outbox) -> None:
        try:
            async for report in requests:
                if is_pong(report):
                    desk.answered(node)
                elif (event := report_from_wire(report, node)) is not None:
                    desk.post(event)
        finally:
            outbox.put_nowait(None)


class Server:
    """An agent's listening end: whoever leads, all listen. A port that refuses tells that its agent is gone."""

    def __init__(self, address: str, token: str = "") -> None:
        self._server = grpc.aio.server(options=_OPTIONS)
        self._servicer = _Servicer(token)
        rpc.add_CoreServicer_to_server(self._servicer, self._server)
        # With port 0 the system chooses one.
        self.port = self._server.add_insecure_port(address)

    def serve(self, desk: Desk | None) -> None:
        """Let agents attach to this coordinator; None: to nobody, here."""
        self._servicer.desk = desk

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(grace=None)
