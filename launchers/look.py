"""Looking at a job from wherever its etcd is reached: ``elastic-launch status``, ``events`` and ``clear``."""

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
    restarts_left: int
    max_restarts: int
    members: list[Member] = field(default_factory=list)
    # Nodes that are a last resort, and why.
    excluded: dict[str, str] = field(default_factory=dict)
    # How many failures are held against each node.
    failures: dict[str, int] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)


def main(command: str, argv: Sequence[str]) -> int:
    as_json = "--json" in argv
    line = parse([word for word in argv if word != "--json"])
    if line.words and command != "clear":
        raise UserError(f"elastic-launch {command}: expected options only, got {line.words[0]!r}")
    values = read(line.options, os.environ)
    job = values["rdzv-id"]
    if not job.text:
        raise UserError(f"elastic-launch {command}: which job? add --job NAME")
    if not values["rdzv-endpoint"].text:
        raise UserError(f"elastic-launch {command}: where is the job's etcd? add --rdzv-endpoint HOST:PORT")
    if command == "clear" and len(line.words) != 1:
        raise UserError("elastic-launch clear: which node? end the line with its name, as status shows it")
    cluster = etcd_of(values, this_machine())
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        found = asyncio.run(_look(command, job.text, cluster, values["connect-timeout"], line.words))
    except OutOfReach as error:
        raise UserError(f"{cluster.named_by} {','.join(cluster.endpoints)}: {error}") from error
    if isinstance(found, str):
        sys.stdout.write((json.dumps({"cleared": found}) if as_json else found) + "\n")
    else:
        _show(found, as_json=as_json)
    return 0


async def _look(
    command: str, job: str, cluster: ClusterConfig, timeout: Given, words: Sequence[str]
) -> Status | tuple[Note, ...] | str:
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
        if command == "clear":
            return await _clear(registry, root, job, words[0])
        return await _status(registry, root, job) if command == "status" else await registry.notes()
    finally:
        await etcd.close()


async def _clear(registry: EtcdRegistry, root: Root, job: str, node: str) -> str:
    """Ask whoever leads to hold nothing against this node any more."""
    from elastic_adapter.core.client import ask_to_clear

    head, record, cards = await registry.head(), await registry.load(), await registry.cards()
    history = record.history
    known = {card.node for card in cards} | {each.node for each in history.failures} | history.kept_out
    if record.outcome is not None:
        raise UserError(f"elastic-launch clear: job {job!r} is over: {record.outcome.reason}")
    if node not in known:
        raise UserError(f"elastic-launch clear: job {job!r} has no node {node!r}: it has {', '.join(sorted(known))}")
    if head.leader is None or not await ask_to_clear(head.leader.address, root.token, node):
        raise UserError(f"elastic-launch clear: nobody who leads job {job!r} could be reached from here: try again")
    held = sum(each.node == node for each in history.failures)
    excluded = " and was excluded" if node in history.kept_out else ""
    return f"node {node} is cleared: it had {held} failure{'s' if held != 1 else ''}{excluded}"


async def _status(registry: EtcdRegistry, root: Root, job: str) -> Status:
    from elastic_adapter.core.client import ask_phase
    from elastic_adapter.core.restart import RestartPolicy

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
    history = record.history
    restarts = int(root.settings.get("max-restarts", "0"))
    window = root.settings.get("restart-window", "none")
    policy = RestartPolicy(restarts, None if window == "none" else float(window))
    # Times are by the clock of whoever wrote them.
    now = time.time() - (record.clock or 0.0)
    used = history.spent(policy, now)
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
        restarts_used=used,
        restarts_left=max(0, restarts - used),
        max_restarts=restarts,
        members=[Member(card.node, card.control, places.get(card.node)) for card in cards],
        excluded={each.node: each.reason for each in history.excluded},
        failures={
            node: history.failed_on(node, policy, now) for node in sorted({each.node for each in history.failures})
        },
        settings=root.settings,
    )


def _show(found: Status | tuple[Note, ...], *, as_json: bool) -> None:
    if as_json:
        values: Any = asdict(found) if isinstance(found, Status) else [asdict(note) for note in found]
        sys.stdout.write(json.dumps(values, indent=2) + "\n")
        return
    from rich.console import Console

    # What workers wrote may look like markup.
    console = Console(soft_wrap=True, markup=False, highlight=False, emoji=False)
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
        ("restarts", f"{status.restarts_used} of {status.max_restarts} used, {status.restarts_left} left"),
    ):
        facts.add_row(name, value)
    for node, reason in status.excluded.items():
        facts.add_row("excluded", f"{node}: {reason}")
    members = Table("node", "listens at", "ranks", "failures", box=None)
    for member in status.members:
        ranks = "spare" if member.ranks is None else "-".join(dict.fromkeys(map(str, member.ranks)))
        members.add_row(member.node, member.listens, ranks, str(status.failures.get(member.node, 0)))
    return facts, members


def _event_table(notes: Sequence[Note]) -> Table:
    from rich.table import Table

    table = Table("time", "kind", "what", box=None)
    for note in notes:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(note.at))
        table.add_row(f"{at}.{int(note.at % 1 * 1000):03d}Z", note.kind, note.text)
    return table
