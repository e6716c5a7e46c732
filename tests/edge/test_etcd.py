"""The etcd client against real etcd servers."""

import asyncio
import os
import signal
import socket
import subprocess

import pytest

from elastic_adapter.core.config import Credentials
from elastic_adapter.core.etcd import (
    AnswerLost,
    Compacted,
    Etcd,
    EtcdRefused,
    EtcdUnavailable,
    created_at,
    delete,
    delete_prefix,
    modified_at,
    put,
    read,
    read_prefix,
)
from helpers.etcd_servers import binary, cluster, openssl, secured
from helpers.ports import free_ports


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("etcd"), 1) as (one,):
        yield one


@pytest.fixture
def use(server, request):
    """Run a coroutine function with a client and a prefix that no other test uses."""

    def run(story, **options):
        async def main():
            client = Etcd([server.endpoint], **options)
            try:
                return await story(client, f"/{request.node.name}-{os.getpid()}/")
            finally:
                await client.close()

        return asyncio.run(main())

    return run


def test_transactions_compare_and_write_in_one_step(use):
    """Only one of two who want to create the same key does; a read in the other branch shows whose it is."""

    async def story(etcd, at):
        first = await etcd.transact([created_at(f"{at}leader", 0)], [put(f"{at}leader", b"a")], [read(f"{at}leader")])
        second = await etcd.transact([created_at(f"{at}leader", 0)], [put(f"{at}leader", b"b")], [read(f"{at}leader")])
        assert (first.succeeded, second.succeeded) == (True, False)
        (found,) = second.reads[0].items
        assert (found.key, found.value, found.created) == (f"{at}leader", b"a", first.revision)
        stale = await etcd.transact([modified_at(f"{at}leader", found.modified + 1)], [delete(f"{at}leader")])
        assert not stale.succeeded
        fresh = await etcd.transact([modified_at(f"{at}leader", found.modified)], [delete(f"{at}leader")])
        assert fresh.succeeded
        assert (await etcd.get(f"{at}leader")).items == ()

    use(story)


def test_prefixes(use):
    """All keys below a prefix are read and deleted together, and no other."""

    async def story(etcd, at):
        await etcd.transact([], [put(f"{at}m/{name}", name.encode()) for name in "abc"] + [put(f"{at}n", b"other")])
        below = await etcd.get_prefix(f"{at}m/")
        assert [item.value for item in below.items] == [b"a", b"b", b"c"]
        answer = await etcd.transact([], [delete_prefix(f"{at}m/"), read_prefix(at)])
        assert [item.key for item in answer.reads[0].items] == [f"{at}n"]

    use(story)


def test_lease_takes_its_keys_along(use):
    """A key lives as long as its lease; a renewed lease lives on; a revoked one is gone at once."""

    async def story(etcd, at):
        lease = await etcd.grant(5)
        assert lease.ttl_s >= 5
        await etcd.transact([], [put(f"{at}member", b"x", lease.id)])
        assert (await etcd.get(f"{at}member")).items[0].lease == lease.id
        assert await etcd.keep_alive(lease.id) == lease.ttl_s
        await etcd.revoke(lease.id)
        assert (await etcd.get(f"{at}member")).items == ()
        assert await etcd.keep_alive(lease.id) == 0
        await etcd.revoke(lease.id)
        with pytest.raises(EtcdRefused, match="lease not found"):
            await etcd.transact([], [put(f"{at}member", b"x", lease.id)])

    use(story)


def test_small_ttl_is_raised_by_etcd(use):
    """What was granted counts, not what was asked for."""

    async def story(etcd, at):
        assert (await etcd.grant(1)).ttl_s >= 1

    use(story)


async def changes(watch, count):
    found = []
    async for batch in watch:
        found.extend(batch)
        if len(found) >= count:
            break
    await watch.aclose()
    return found


def test_watch_begins_where_it_is_told(use):
    """Changes from before the watch are seen if they are after the revision that it begins at."""

    async def story(etcd, at):
        begin = (await etcd.get(at)).revision
        await etcd.transact([], [put(f"{at}a", b"1")])
        await etcd.transact([], [put(f"{at}a", b"2"), put(f"{at}b", b"3")])
        await etcd.transact([], [delete(f"{at}a")])
        seen = await asyncio.wait_for(changes(etcd.watch(at, begin), 4), 20)
        assert [(change.item.key[len(at) :], change.item.value, change.deleted) for change in seen] == [
            ("a", b"1", False),
            ("a", b"2", False),
            ("b", b"3", False),
            ("a", b"", True),
        ]

    use(story)


def test_watch_of_a_compacted_past_says_so(use, server):
    """A watch that is to begin in a past that etcd no longer has raises Compacted instead of waiting for ever."""

    async def story(etcd, at):
        for number in range(3):
            answer = await etcd.transact([], [put(f"{at}a", str(number).encode())])
        subprocess.run(
            [binary("etcdctl"), "--endpoints", server.endpoint, "compact", str(answer.revision)],
            check=True,
            capture_output=True,
            timeout=20,
        )
        with pytest.raises(Compacted) as caught:
            await asyncio.wait_for(changes(etcd.watch(at, answer.revision - 2), 1), 20)
        assert caught.value.revision == answer.revision

    use(story)


def test_nobody_there():
    """An endpoint that refuses: one clear error when the time is over, naming it."""
    (port,) = free_ports(1)

    async def main():
        etcd = Etcd([f"127.0.0.1:{port}"], timeout_s=0.5)
        try:
            with pytest.raises(EtcdUnavailable, match=f"127.0.0.1:{port}"):
                await etcd.get("x")
            with pytest.raises(EtcdUnavailable):
                await etcd.transact([], [put("x", b"")])
        finally:
            await etcd.close()

    asyncio.run(main())


def test_silent_listener():
    """Something that accepts connections and never speaks is given up when the time is over."""

    async def main():
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            sock.listen()
            etcd = Etcd([f"127.0.0.1:{sock.getsockname()[1]}"], timeout_s=0.5)
            try:
                with pytest.raises(EtcdUnavailable):
                    await etcd.get("x")
            finally:
                await etcd.close()

    asyncio.run(main())


def test_watch_and_client_outlive_a_restart_of_etcd(tmp_path):
    """etcd is killed and started again: the watch goes on without a gap, and so does the client."""
    with cluster(tmp_path, 1) as (one,):

        async def main():
            etcd = Etcd([one.endpoint], timeout_s=20)
            begin = (await etcd.transact([], [put("/k", b"0")])).revision
            watching = asyncio.create_task(changes(etcd.watch("/k", begin), 2))
            await etcd.transact([], [put("/k", b"1")])
            one.kill()
            one.start()
            await etcd.get("/k")
            await etcd.transact([], [put("/k", b"2")])
            seen = await asyncio.wait_for(watching, 30)
            await etcd.close()
            return [change.item.value for change in seen]

        assert asyncio.run(main()) == [b"1", b"2"]


@pytest.mark.timeout(120)
def test_one_of_three_is_killed(tmp_path):
    """A cluster of three loses the member that we talk to: reads, writes and watches go on at another."""
    with cluster(tmp_path, 3) as servers:

        async def main():
            etcd = Etcd([server.endpoint for server in servers], timeout_s=20)
            begin = (await etcd.transact([], [put("/k", b"0")])).revision
            watching = asyncio.create_task(changes(etcd.watch("/k", begin), 5))
            lease = await etcd.grant(30)
            servers[0].kill()
            written = 0
            while written < 5:
                try:
                    await etcd.transact([], [put("/k", str(written).encode(), lease.id)])
                    written += 1
                except AnswerLost:
                    # It may have been applied: look before going on.
                    (item,) = (await etcd.get("/k")).items
                    written += item.value == str(written).encode() and item.modified > begin
            seen = await asyncio.wait_for(watching, 30)
            assert await etcd.keep_alive(lease.id) > 0
            await etcd.close()
            return [change.item.value for change in seen]

        assert asyncio.run(main()) == [b"0", b"1", b"2", b"3", b"4"]


def test_stopped_server_leaves_the_writer_unsure(tmp_path):
    """A server that stops answering in the middle: a write raises AnswerLost, a read EtcdUnavailable."""
    with cluster(tmp_path, 1) as (one,):

        async def main():
            etcd = Etcd([one.endpoint], timeout_s=1.0)
            await etcd.get("/k")
            one.process.send_signal(signal.SIGSTOP)
            os.waitpid(one.process.pid, os.WUNTRACED)
            with pytest.raises(AnswerLost):
                await etcd.transact([], [put("/k", b"1")])
            with pytest.raises(EtcdUnavailable):
                await etcd.get("/k")
            one.process.send_signal(signal.SIGCONT)
            patient = Etcd([one.endpoint], timeout_s=20)
            await patient.get("/k")
            await patient.close()
            await etcd.close()

        asyncio.run(main())


def etcdctl(server, *words):
    argv = [binary("etcdctl"), "--endpoints", server.endpoint, *words]
    subprocess.run(argv, check=True, capture_output=True, timeout=20)


def enable_users(server):
    for words in (("user", "add", "root:secret"), ("user", "grant-role", "root", "root"), ("auth", "enable")):
        etcdctl(server, *words)


def test_users_and_passwords(tmp_path):
    """With authentication on: the right password works, also after etcd forgot the token; a wrong one is refused."""
    with cluster(tmp_path, 1, "--auth-token-ttl", "1") as (one,):
        enable_users(one)

        async def main():
            etcd = Etcd([one.endpoint], Credentials("root", "secret"), timeout_s=20)
            await etcd.transact([], [put("/k", b"1")])
            one.kill()
            one.start()
            assert (await etcd.get("/k")).items[0].value == b"1"
            await etcd.transact([], [put("/k", b"2")])
            await etcd.close()
            for wrong in (Credentials("root", "guess"), Credentials()):
                stranger = Etcd([one.endpoint], wrong, timeout_s=5)
                with pytest.raises(EtcdRefused):
                    await stranger.get("/k")
                await stranger.close()

        asyncio.run(main())
        assert "secret" not in repr(Credentials("root", "secret"))


def test_a_change_of_users_outdates_signed_tokens(tmp_path):
    """etcd with jwt tokens refuses those of before a change of users or rights: a new one is asked for, by itself."""
    openssl(tmp_path, *"genrsa -out jwt.key 2048".split())
    openssl(tmp_path, *"rsa -in jwt.key -pubout -out jwt.pub".split())
    keys = f"pub-key={tmp_path}/jwt.pub,priv-key={tmp_path}/jwt.key"
    with cluster(tmp_path, 1, "--auth-token", f"jwt,{keys},sign-method=RS256,ttl=10m") as (one,):
        enable_users(one)

        async def main():
            etcd = Etcd([one.endpoint], Credentials("root", "secret"), timeout_s=20)
            begin = await etcd.transact([], [put("/k", b"1")])
            lease = await etcd.grant(60)
            watch = etcd.watch("/k", begin.revision)
            calls = (
                lambda: etcd.transact([], [put("/k", b"2")]),
                lambda: etcd.keep_alive(lease.id),
                lambda: etcd.get("/k"),
            )
            for number, call in enumerate(calls):
                etcdctl(one, "--user", "root:secret", "user", "add", f"somebody{number}:else")
                await call()
            (seen,) = await asyncio.wait_for(changes(watch, 1), 20)
            assert seen.item.value == b"2"
            await etcd.close()

        asyncio.run(main())


def test_tls(tmp_path):
    """With TLS on both sides: our certificate lets us in, none does not."""

    async def main(endpoint, paths):
        etcd = Etcd([endpoint], Credentials(**paths), timeout_s=20)
        await etcd.transact([], [put("/k", b"1")])
        assert (await etcd.get("/k")).items[0].value == b"1"
        await etcd.close()
        stranger = Etcd([endpoint], Credentials(ca=paths["ca"]), timeout_s=1)
        with pytest.raises(EtcdUnavailable):
            await stranger.get("/k")
        await stranger.close()

    with secured(tmp_path) as (endpoint, paths):
        asyncio.run(main(endpoint, paths))


def test_many_writes_at_once(use):
    """Sixty-four writers at once on one client: nothing is lost."""

    async def story(etcd, at):
        await asyncio.gather(*(etcd.transact([], [put(f"{at}{number}", b"x")]) for number in range(640)))
        assert len((await etcd.get_prefix(at)).items) == 640

    use(story, timeout_s=20)
