"""Looking at a job from wherever its etcd is reached: ``elastic-launch status`` and ``elastic-launch events``."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from elastic_adapter.core.errors import OutOfReach, UserError
from elastic_adapter.launchers.command_line import parse
from elastic_adapter.launchers.devices import this_machine
from elastic_adapter.launchers.rendezvous import etcd_of
from elastic_adapter.launchers.settings import Given, read

if TYPE_CHECKING:
    from rich.table import Table

    from elastic_adapter.core.codec import Root
    from elastic_adapter.core.config import ClusterConfig
    from elastic_adapter.core.ports import Note
    from elastic_adapter.core.registry import EtcdRegistry


@dataclass(frozen=True, slots=True)
class Member:
    node: str
    listens: str
    # The first and the last of its ranks; None: it has no place in the world.
    ranks: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Status:
    job: str
    run: int
    phase: str
    reason: str
    generation: int
    world_size: int
    leader: str | None
    restarts_used: int
    max_restarts: int
    members: list[Member] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)


def main(command: str, argv: Sequence[str]) -> int:
    as_json = "--json" in argv
    line = parse([word for word in argv if word != "--json"])
    if line.words:
        raise UserError(f"elastic-launch {command}: expected options only, got {line.words[0]!r}")
    values = read(line.options, os.environ)
    job = values["rdzv-id"]
    if not job.text:
        raise UserError(f"elastic-launch {command}: which job? add --job NAME")
    if not values["rdzv-endpoint"].text:
        raise UserError(f"elastic-launch {command}: where is the job's etcd? add --rdzv-endpoint HOST:PORT")
    cluster = etcd_of(values, this_machine())
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        found = asyncio.run(_look(command, job.text, cluster, values["connect-timeout"]))
    except OutOfReach as error:
        raise UserError(f"{cluster.named_by} {','.join(cluster.endpoints)}: {error}") from error
    _show(found, as_json=as_json)
    return 0


async def _look(command: str, job: str, cluster: ClusterConfig, timeout: Given) -> Status | tuple[Note, ...]:
    from elastic_adapter.core.codec import Card
    from elastic_adapter.core.etcd import Etcd
    from elastic_adapter.core.registry import EtcdRegistry

    etcd = Etcd(cluster.endpoints, cluster.credentials, timeout.seconds(positive=True))
    try:
        registry = EtcdRegistry(etcd, job, Card("", "", ""))
        root = await registry.find()
        if root is None:
            raise UserError(
                f"there is no job {job!r} in etcd at {', '.join(cluster.endpoints)}, nor one that ended lately"
            )
        return await _status(registry, root, job) if command == "status" else await registry.notes()
    finally:
        await etcd.close()


async def _status(registry: EtcdRegistry, root: Root, job: str) -> Status:
    from elastic_adapter.core.client import ask_phase

    head, record, cards = await registry.head(), await registry.load(), await registry.cards()
    world = record.world
    phase, reason = "gathering", "no world has been formed yet"
    if world is not None:
        phase, reason = "running", world.reason
    if record.outcome is not None:
        phase, reason = "finished", f"{type(record.outcome).__name__.lower()}: {record.outcome.reason}"
    elif head.leader is None:
        phase, reason = "without a leader", "nobody leads it: its nodes are gone, or about to find a leader"
    else:
        phase, reason = await ask_phase(head.leader.address, root.token) or (phase, reason)
    places = (
        {each.node: (each.rank_offset, each.rank_offset + each.slots - 1) for each in world.placements} if world else {}
    )
    return Status(
        job=job,
        run=registry.run,
        phase=phase,
        reason=reason,
        generation=world.generation if world is not None else 0,
        world_size=world.world_size if world is not None else 0,
        leader=head.leader.node if head.leader is not None else None,
        restarts_used=record.history.count,
        max_restarts=int(root.settings.get("max-restarts", "0")),
        members=[Member(card.node, card.control, places.get(card.node)) for card in cards],
        settings=root.settings,
    )


def _show(found: Status | tuple[Note, ...], *, as_json: bool) -> None:
    if as_json:
        values: Any = asdict(found) if isinstance(found, Status) else [asdict(note) for note in found]
        sys.stdout.write(json.dumps(values, indent=2) + "\n")
        return
    from rich.console import Console

    console = Console(soft_wrap=True)
    for table in _status_tables(found) if isinstance(found, Status) else (_event_table(found),):
        console.print(table)


def _status_tables(status: Status) -> tuple[Table, Table]:
    from rich.table import Table

    facts = Table(show_header=False, box=None)
    for name, value in (
        ("job", f"{status.job} (run {status.run})"),
        ("phase", f"{status.phase}: {status.reason}"),
        ("world", f"generation {status.generation}, {status.world_size} workers" if status.generation else "none yet"),
        ("leader", status.leader or "none"),
        ("restarts", f"{status.restarts_used} of {status.max_restarts} used"),
    ):
        facts.add_row(name, value)
    members = Table("node", "listens at", "ranks", box=None)
    for member in status.members:
        ranks = "spare" if member.ranks is None else "-".join(dict.fromkeys(map(str, member.ranks)))
        members.add_row(member.node, member.listens, ranks)
    return facts, members


def _event_table(notes: Sequence[Note]) -> Table:
    from rich.table import Table

    table = Table("time", "kind", "what", box=None)
    for note in notes:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(note.at))
        table.add_row(f"{at}.{int(note.at % 1 * 1000):03d}Z", note.kind, note.text)
    return table
