"""What would be run, as text: the settings, where each came from, and each worker's environment and command.

Values whose names look secret are masked, in variables, settings and arguments.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from elastic_adapter.core.model import Assignment, Endpoint, Peer, Seat
from elastic_adapter.core.ports import PythonProgram
from elastic_adapter.launchers.plan import LaunchPlan

_MASK = "******"
_SECRET = re.compile(
    r"(?:^|[^a-z])[a-z]*(?:token|pass$|(?:passwd|password|passphrase|pwd|secret|key|credential|auth)s?)(?:[^a-z]|$)"
)
_PAIR = re.compile(r"([\w.-]+)=([^\s,;&]+)")
_USER_INFO = re.compile(r"(://[^/\s:@]*):[^/\s@]+@")


class _FreePort(int):
    """A port that is not known yet: one is reserved when the job starts. Nor is any that is counted from it."""

    def __str__(self) -> str:
        return "<free port>"

    def _unknown(self, _: object) -> _FreePort:
        return self

    __add__ = __radd__ = __sub__ = __mod__ = _unknown


def describe(plan: LaunchPlan, inherited: Mapping[str, str]) -> str:
    """The whole text. Nothing is started, reserved or written."""
    lines = ["settings", *_settings(plan)]
    for local_rank in range(plan.node.slots):
        lines += ["", f"worker {local_rank}{_condition(plan)}", *_worker(plan, local_rank, inherited)]
    if plan.notes:
        lines += ["", "notes", *(f"  {note}" for note in plan.notes)]
    return "\n".join(lines) + "\n"


def _settings(plan: LaunchPlan) -> Iterator[str]:
    rows = [(source.name, masked("", source.value) or "-", source.origin) for source in plan.sources]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, value, origin in rows:
        yield f"  {name:{widths[0]}}  {value:{widths[1]}}  {origin}"


def _worker(plan: LaunchPlan, local_rank: int, inherited: Mapping[str, str]) -> Iterator[str]:
    yield "  environment, besides what it inherits"
    env = plan.adapter.slot_env(local_rank, plan.node.slots, inherited) | plan.adapter.worker_env(
        _seat(plan, local_rank)
    )
    for name in sorted(env):
        yield f"    {name}={masked(name, env[name])}"
    if plan.node.cpus:
        yield f"  CPUs {','.join(str(cpu) for cpu in sorted(plan.node.cpus[local_rank]))}"
    yield "  command"
    yield "    " + shlex.join(masked_arguments(_command(plan, local_rank)))


def _command(plan: LaunchPlan, local_rank: int) -> tuple[str, ...]:
    program = plan.program
    if plan.node.pass_local_rank and isinstance(program, PythonProgram):
        program = replace(program, args=(f"--local-rank={local_rank}", *program.args))
    return program.command()


def _condition(plan: LaunchPlan) -> str:
    """Which place a node gets among others, and how many come, is known at the start only."""
    nodes = plan.job.max_nodes
    return "" if plan.cluster is None else f", if this node is number {(plan.node.place or 0) + 1} of {nodes}"


def _seat(plan: LaunchPlan, local_rank: int) -> Seat:
    """The place of a worker in the first generation, if all nodes come."""
    slots, nodes, place = plan.node.slots, plan.job.max_nodes, plan.node.place or 0
    master = plan.node.address if place == 0 else "<address of the first node>"
    return Seat(
        assignment=Assignment(
            generation=1,
            restart_count=0,
            group_rank=place,
            group_size=nodes,
            rank_offset=place * slots,
            slots=slots,
            world_size=nodes * slots,
            master=Endpoint(master, plan.node.master_port or _FreePort()),
            reason="dry run",
            peers=tuple(
                Peer(plan.node.address if number == place else f"<address of node {number + 1}>", slots)
                for number in range(nodes)
            ),
        ),
        local_rank=local_rank,
        job_id=plan.job.job_id,
        node=plan.node.node,
        max_restarts=plan.job.policy.max_restarts,
        role=plan.node.role,
        error_file="<made at the start>",
    )


def masked(name: str, value: str) -> str:
    """The value, unless its name, or that of a pair inside it, looks secret.

    >>> masked("rdzv-conf", "user=ann,password=x1")
    'user=ann,password=******'
    """
    if value and _SECRET.search(name.lower()):
        return _MASK
    value = _USER_INFO.sub(rf"\1:{_MASK}@", value)
    return _PAIR.sub(lambda pair: f"{pair[1]}={_MASK}" if _SECRET.search(pair[1].lower()) else pair[0], value)


def masked_arguments(words: Iterable[str]) -> Iterator[str]:
    """--token=x and --token x."""
    before = ""
    for word in words:
        is_value = before.startswith("-") and "=" not in before and not word.startswith("-")
        yield masked(before if is_value else "", word)
        before = word
