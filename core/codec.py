"""How a job's record and its members are written in etcd: JSON, so that a person with etcdctl can read it. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from elastic_adapter.core.blame import Inquest
from elastic_adapter.core.errors import assert_never
from elastic_adapter.core.model import (
    CheckpointRef,
    Endpoint,
    Failed,
    Outcome,
    Placement,
    Stopped,
    Succeeded,
    WorkerExit,
    World,
)
from elastic_adapter.core.ports import Note, Record
from elastic_adapter.core.restart import Exclusion, Failure, History


@dataclass(frozen=True, slots=True)
class Root:
    """A run's first key: what all nodes must agree on, and the token that its agents show each other."""

    settings: dict[str, str]
    token: str
    # Tells this run from one of the same number in an etcd that lost its data.
    nonce: str
    # Who began the run, and when (wall clock, for people).
    node: str
    at: float


@dataclass(frozen=True, slots=True)
class Card:
    """What an agent writes of itself: as a member, and as the leader."""

    node: str
    # Where it listens.
    control: str
    # New for every agent process: tells a node's agent from the one before it.
    incarnation: str


def root_to_bytes(root: Root) -> bytes:
    return _dump(asdict(root))


def root_from_bytes(data: bytes) -> Root:
    return Root(**json.loads(data))


def card_to_bytes(card: Card) -> bytes:
    return _dump(asdict(card))


def card_from_bytes(data: bytes) -> Card:
    return Card(**json.loads(data))


def note_to_bytes(note: Note) -> bytes:
    return _dump(asdict(note))


def note_from_bytes(data: bytes) -> Note:
    return Note(**json.loads(data))


def record_to_bytes(record: Record) -> bytes:
    return _dump(
        {
            "world": None if record.world is None else asdict(record.world),
            "history": asdict(record.history),
            "clock": record.clock,
            "outcome": None if record.outcome is None else _outcome_to_json(record.outcome),
            "finished": sorted(record.finished),
            "ended_at": record.ended_at,
            "inquest": None if record.inquest is None else asdict(record.inquest),
            "checkpoints": [asdict(each) for each in record.checkpoints],
        }
    )


def record_from_bytes(data: bytes) -> Record:
    values = json.loads(data)
    return Record(
        world=None if values["world"] is None else _world_from_json(values["world"]),
        history=_history_from_json(values["history"]),
        outcome=None if values["outcome"] is None else _outcome_from_json(values["outcome"]),
        finished=frozenset(values["finished"]),
        ended_at=values["ended_at"],
        clock=values.get("clock"),
        inquest=_inquest_from_json(values.get("inquest")),
        checkpoints=tuple(CheckpointRef(**each) for each in values.get("checkpoints", ())),
    )


def _dump(values: dict[str, Any]) -> bytes:
    # A file's name in a traceback may hold bytes that are no text: escaped, they come back as they were.
    return json.dumps(values, separators=(",", ":"), ensure_ascii=True).encode()


def _world_from_json(values: dict[str, Any]) -> World:
    resume = values["resume_from"]
    return World(
        **{
            **values,
            "placements": tuple(Placement(**each) for each in values["placements"]),
            "master": Endpoint(**values["master"]),
            "resume_from": None if resume is None else CheckpointRef(**resume),
        }
    )


def _history_from_json(values: dict[str, Any]) -> History:
    failures = (Failure(**each) for each in values.get("failures", ()))
    excluded = (Exclusion(**each) for each in values.get("excluded", ()))
    return History(tuple(values["charged"]), tuple(failures), tuple(excluded))


def _inquest_from_json(values: dict[str, Any] | None) -> Inquest | None:
    if values is None:
        return None
    return Inquest(**{**values, "exits": tuple(WorkerExit(**each) for each in values["exits"])})


def _outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    match outcome:
        case Succeeded():
            return {"kind": "succeeded", **asdict(outcome)}
        case Failed():
            return {"kind": "failed", **asdict(outcome)}
        case Stopped():
            return {"kind": "stopped", **asdict(outcome)}
        case _:
            assert_never(outcome)


def _outcome_from_json(values: dict[str, Any]) -> Outcome:
    match values:
        case {"kind": "succeeded", "reason": reason}:
            return Succeeded(reason)
        case {"kind": "stopped", "reason": reason, "signal": signal}:
            return Stopped(reason, signal)
        case _:
            first = values["first"]
            return Failed(
                values["reason"],
                None if first is None else WorkerExit(**first),
                others=tuple(WorkerExit(**each) for each in values.get("others", ())),
                more=values.get("more", 0),
                restarts_left=values.get("restarts_left"),
            )
