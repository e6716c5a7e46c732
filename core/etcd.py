"""A small client of etcd's v3 API: several endpoints, leases, watches that resume, transactions, TLS, passwords.

What it does not do: decide. A write whose answer was lost may have been applied: it is not repeated here but raised
as ``AnswerLost``, and whoever wrote reads back before deciding what to do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio

from elastic_adapter.core.config import Credentials
from elastic_adapter.core.errors import ElasticError, OutOfReach
from elastic_adapter.proto import etcd_pb2 as pb

T = TypeVar("T")

# What a transaction asks before it does anything.
Compare = pb.Compare
# What it does then.
RequestOp = pb.RequestOp

# A peer that is silent although its host is up (stopped, or cut off) is noticed by unanswered pings.
_CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_retries", 0),
    # What the http_proxy variables name is no way to etcd.
    ("grpc.enable_http_proxy", 0),
)
_PAUSE_S = 0.1


class EtcdUnavailable(OutOfReach):
    """No endpoint answered in time. Nothing was written; reading again later is safe."""


class AnswerLost(OutOfReach):
    """A write was sent and no answer came: it may or may not have been applied. Read back before deciding."""


class EtcdRefused(OutOfReach):
    """etcd answered and refuses: wrong credentials, missing rights, a bad request. Repeating it may not help."""

    @property
    def about_us(self) -> bool:
        """Whether it is about who we are."""
        return any(words in str(self) for words in ("user name", "authentication", "auth token", "permission denied"))


class Compacted(ElasticError):
    """The history that a watch was to resume from is gone. Read everything anew and watch from there."""

    def __init__(self, revision: int) -> None:
        super().__init__(f"etcd has compacted its history up to revision {revision}")
        self.revision = revision


@dataclass(frozen=True, slots=True)
class Item:
    """A key with its value, as of a revision."""

    key: str
    value: bytes
    created: int
    modified: int
    lease: int


@dataclass(frozen=True, slots=True)
class Change:
    """An item was put, or its key deleted (then only key and revision mean something)."""

    item: Item
    deleted: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was found, as of one revision; ``cluster`` tells one etcd from another."""

    items: tuple[Item, ...]
    revision: int
    cluster: int


@dataclass(frozen=True, slots=True)
class Lease:
    id: int
    # What etcd granted, which may be more than was asked for.
    ttl_s: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What a transaction came to. ``reads`` are the results of the branch's reads, in order."""

    succeeded: bool
    revision: int
    reads: tuple[Snapshot, ...]


def created_at(key: str, revision: int) -> pb.Compare:
    """Holds if the key exists since exactly this revision; 0: if it does not exist."""
    return pb.Compare(target=pb.Compare.CREATE, key=key.encode(), create_revision=revision)


def modified_at(key: str, revision: int) -> pb.Compare:
    """Holds if the key was last written at exactly this revision."""
    return pb.Compare(target=pb.Compare.MOD, key=key.encode(), mod_revision=revision)


def value_is(key: str, value: bytes) -> pb.Compare:
    """Holds if the key exists and has exactly this value."""
    return pb.Compare(target=pb.Compare.VALUE, key=key.encode(), value=value)


def put(key: str, value: bytes, lease: int = 0) -> pb.RequestOp:
    return pb.RequestOp(request_put=pb.PutRequest(key=key.encode(), value=value, lease=lease))


def delete(key: str) -> pb.RequestOp:
    return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key.encode()))


def delete_prefix(prefix: str) -> pb.RequestOp:
    request = pb.DeleteRangeRequest(key=prefix.encode(), range_end=_after(prefix.encode()))
    return pb.RequestOp(request_delete_range=request)


def read(key: str) -> pb.RequestOp:
    return pb.RequestOp(request_range=pb.RangeRequest(key=key.encode()))


def read_prefix(prefix: str) -> pb.RequestOp:
    return pb.RequestOp(request_range=pb.RangeRequest(key=prefix.encode(), range_end=_after(prefix.encode())))


class Etcd:
    """One client per process. Every call has a deadline."""

    def __init__(
        self, endpoints: Sequence[str], credentials: Credentials | None = None, timeout_s: float = 5.0
    ) -> None:
        self._endpoints = tuple(endpoints)
        self._credentials = credentials or Credentials()
        self._timeout_s = timeout_s
        self._channels = [self._open(endpoint) for endpoint in self._endpoints]
        # The endpoint that answered last: asked first.
        self._current = 0
        self._token: str | None = None

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def get(self, key: str) -> Snapshot:
        return await self._range(pb.RangeRequest(key=key.encode()))

    async def get_prefix(self, prefix: str) -> Snapshot:
        return await self._range(pb.RangeRequest(key=prefix.encode(), range_end=_after(prefix.encode())))

    async def transact(
        self, compare: Sequence[pb.Compare], success: Sequence[pb.RequestOp], failure: Sequence[pb.RequestOp] = ()
    ) -> Answer:
        """If all comparisons hold do the one, else the other, in one step. Raises AnswerLost when unsure."""
        request = pb.TxnRequest(compare=compare, success=success, failure=failure)
        reply = await self._call("KV/Txn", request, pb.TxnResponse, repeatable=False)
        reads = tuple(
            _snapshot(op.response_range, reply.header) for op in reply.responses if op.HasField("response_range")
        )
        return Answer(reply.succeeded, reply.header.revision, reads)

    async def grant(self, ttl_s: int) -> Lease:
        """A new lease. One whose answer was lost ends by itself, so asking again is safe."""
        reply = await self._call("Lease/LeaseGrant", pb.LeaseGrantRequest(TTL=ttl_s), pb.LeaseGrantResponse)
        return Lease(reply.ID, reply.TTL)

    async def revoke(self, lease: int) -> None:
        """End a lease now. One that is gone already is no error."""
        try:
            await self._call("Lease/LeaseRevoke", pb.LeaseRevokeRequest(ID=lease), pb.LeaseRevokeResponse)
        except EtcdRefused as refused:
            if not isinstance(refused.__cause__, grpc.aio.AioRpcError):
                raise
            if refused.__cause__.code() != grpc.StatusCode.NOT_FOUND:
                raise

    async def keep_alive(self, lease: int) -> int:
        """Renew a lease once; the seconds it lives from now on, 0 when it is gone."""
        request = pb.LeaseKeepAliveRequest(ID=lease)
        reply = await self._call("Lease/LeaseKeepAlive", request, pb.LeaseKeepAliveResponse, streaming=True)
        return int(reply.TTL)

    async def watch(self, prefix: str, after: int) -> AsyncIterator[tuple[Change, ...]]:
        """All changes below a prefix after a revision, without a gap, across lost connections. Raises Compacted."""
        next_revision = after + 1
        while True:
            try:
                async for reply in self._watch_once(prefix, next_revision):
                    # Changes of one revision come together; those of later ones may follow in another answer.
                    next_revision = max(event.kv.mod_revision for event in reply.events) + 1
                    yield tuple(_change(event) for event in reply.events)
            except grpc.aio.AioRpcError as error:
                await self._after_error(error)
            await asyncio.sleep(_PAUSE_S)

    async def _watch_once(self, prefix: str, start: int) -> AsyncIterator[pb.WatchResponse]:
        key = prefix.encode()
        create = pb.WatchCreateRequest(key=key, range_end=_after(key), start_revision=start)
        method = self._channels[self._current].stream_stream(
            "/etcdserverpb.Watch/Watch",
            request_serializer=pb.WatchRequest.SerializeToString,
            response_deserializer=pb.WatchResponse.FromString,
        )
        call = method(metadata=await self._metadata())
        try:
            await call.write(pb.WatchRequest(create_request=create))
            async for reply in call:
                if reply.compact_revision:
                    raise Compacted(reply.compact_revision)
                if reply.canceled:
                    raise EtcdRefused(f"etcd ended the watch: {reply.cancel_reason}")
                if reply.events:
                    yield reply
        finally:
            call.cancel()

    async def _range(self, request: pb.RangeRequest) -> Snapshot:
        reply = await self._call("KV/Range", request, pb.RangeResponse)
        return _snapshot(reply, reply.header)

    async def _call(
        self,
        method: str,
        request: Any,
        reply_type: Callable[[], T],
        *,
        repeatable: bool = True,
        streaming: bool = False,
    ) -> T:
        """Ask one endpoint after the other until one answers or the time is over."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            left = deadline - time.monotonic()
            # With others to ask, one that is silent must not use up all the time.
            patience = left if len(self._endpoints) == 1 else min(left, self._timeout_s / 2)
            sent = False
            try:
                await self._ready(patience)
                sent = True
                return await self._once(method, request, reply_type, patience, streaming=streaming)
            except grpc.aio.AioRpcError as error:
                if sent and not repeatable and not self._is_outdated_token(error):
                    self._refuse(error)
                    self._current = (self._current + 1) % len(self._endpoints)
                    raise AnswerLost(f"{method}: {error.details()}") from error
                await self._after_error(error)
            except asyncio.TimeoutError:
                self._current = (self._current + 1) % len(self._endpoints)
            if time.monotonic() + _PAUSE_S >= deadline:
                raise EtcdUnavailable(f"no answer from etcd at {', '.join(self._endpoints)} in {self._timeout_s:g} s")
            await asyncio.sleep(_PAUSE_S)

    async def _ready(self, within_s: float) -> None:
        """Wait for a connection to the current endpoint, so that a refused one is known to have got nothing."""
        await asyncio.wait_for(self._connected(self._channels[self._current]), max(within_s, 0.001))

    async def _connected(self, channel: grpc.aio.Channel) -> None:
        state = channel.get_state(try_to_connect=True)
        while state != grpc.ChannelConnectivity.READY:
            if state == grpc.ChannelConnectivity.TRANSIENT_FAILURE and len(self._channels) > 1:
                raise asyncio.TimeoutError
            await channel.wait_for_state_change(state)
            state = channel.get_state(try_to_connect=True)

    async def _once(
        self, method: str, request: Any, reply_type: Callable[[], T], within_s: float, *, streaming: bool
    ) -> T:
        channel = self._channels[self._current]
        options = {
            "request_serializer": type(request).SerializeToString,
            "response_deserializer": getattr(reply_type, "FromString"),  # noqa: B009 (a message class has it)
        }
        metadata = await self._metadata()
        reply: T
        if not streaming:
            ask = channel.unary_unary(f"/etcdserverpb.{method}", **options)
            reply = await ask(request, timeout=within_s, metadata=metadata)
            return reply
        call = channel.stream_stream(f"/etcdserverpb.{method}", **options)(timeout=within_s, metadata=metadata)
        try:
            await call.write(request)
            reply = await call.read()
        finally:
            call.cancel()
        if reply is grpc.aio.EOF:
            raise asyncio.TimeoutError
        return reply

    async def _metadata(self) -> tuple[tuple[str, str], ...]:
        """What proves who we are: a token, asked for when there is none or the last one is no longer good."""
        credentials = self._credentials
        if credentials.user is None:
            return ()
        if self._token is None:
            request = pb.AuthenticateRequest(name=credentials.user, password=credentials.password or "")
            authenticate = self._channels[self._current].unary_unary(
                "/etcdserverpb.Auth/Authenticate",
                request_serializer=pb.AuthenticateRequest.SerializeToString,
                response_deserializer=pb.AuthenticateResponse.FromString,
            )
            self._token = (await authenticate(request, timeout=self._timeout_s)).token
        return (("token", self._token),)

    async def _after_error(self, error: grpc.aio.AioRpcError) -> None:
        """Get ready to ask again: elsewhere, or with a new token; raise what asking again does not help."""
        if self._is_outdated_token(error):
            self._token = None
            return
        self._refuse(error)
        self._current = (self._current + 1) % len(self._endpoints)

    def _is_outdated_token(self, error: grpc.aio.AioRpcError) -> bool:
        """Whether a new token helps: this one has expired, or is of before a change of users (known to jwt tokens)."""
        old = any(words in (error.details() or "") for words in _OLD_TOKEN)
        return self._token is not None and (old or error.code() == grpc.StatusCode.UNAUTHENTICATED)

    def _refuse(self, error: grpc.aio.AioRpcError) -> None:
        if error.code() in _FINAL:
            raise EtcdRefused(f"etcd refuses: {error.details()}") from error

    def _open(self, endpoint: str) -> grpc.aio.Channel:
        credentials = self._credentials
        if credentials.ca is None and credentials.cert is None:
            return grpc.aio.insecure_channel(endpoint, options=_CHANNEL_OPTIONS)
        secure = grpc.ssl_channel_credentials(
            root_certificates=_bytes(credentials.ca),
            private_key=_bytes(credentials.key),
            certificate_chain=_bytes(credentials.cert),
        )
        return grpc.aio.secure_channel(endpoint, secure, options=_CHANNEL_OPTIONS)


# etcd's words for it, which differ between its versions and calls, as do the codes.
_OLD_TOKEN = ("revision in header is old", "revision of auth store is old")

# What asking again does not change.
_FINAL = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
        # A lease that is gone.
        grpc.StatusCode.NOT_FOUND,
        # No space left in etcd.
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)


def _after(prefix: bytes) -> bytes:
    """The first key behind all that begin with the prefix."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _item(kv: pb.KeyValue) -> Item:
    return Item(kv.key.decode(), kv.value, kv.create_revision, kv.mod_revision, kv.lease)


def _change(event: pb.Event) -> Change:
    return Change(_item(event.kv), deleted=event.type == pb.Event.DELETE)


def _snapshot(reply: pb.RangeResponse, header: pb.ResponseHeader) -> Snapshot:
    return Snapshot(tuple(_item(kv) for kv in reply.kvs), header.revision, header.cluster_id)


def _bytes(path: str | None) -> bytes | None:
    if path is None:
        return None
    with open(path, "rb") as file:
        return file.read()
