"""Who writes a draft or has a buffer, by the token in its name: that says when nobody wants it any more."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import time
from pathlib import Path

from elastic_adapter.core.checkpoint.manifest import is_temporary, parse_draft

# Tokens of what is being deleted, by somebody who may have been killed over it.
GOING = PRUNED, SWEPT = "pruned", "swept"
# Of what is being replaced, where that takes two steps: there may be no other copy. Only who replaces it deletes it.
OLD = "old"
_YOUNG_S = 3600.0
_OWNED = re.compile(r"\.staging-[^.]*@([^.]+)-[0-9]+\..*")
_PROCESS = re.compile(r"(.*)-([0-9]+)-([0-9]+)")
_JOB = re.compile(r"job-([0-9a-f]{16})-.*")


def own_token() -> str:
    """Of a program that runs alone: where it is, and its process. No later process has the same."""
    return f"{_machine()}-{os.getpid()}-{_started(os.getpid())}"


def job_token(job: str, run: str) -> str:
    """Of one run of a job. A job has one at a time in its etcd, so that of another run is over.

    Without an etcd nobody sees to that: a run is known by its agent's process then.
    """
    if _PROCESS.fullmatch(run):
        return run
    return f"job-{hashlib.blake2s(job.encode(), digest_size=8).hexdigest()}-{run}"


def still_runs(token: str) -> bool | None:
    """Whether the process of this token is there; None: it can't be seen from here, or the token is no process's."""
    found = _PROCESS.fullmatch(token)
    if found is None or found[1] != _machine():
        return None
    return _started(int(found[2])) == found[3]


def owner_of(name: str) -> str | None:
    """Whose a buffer beside checkpoints is, by its name: the process that runs the workers; None: it does not say."""
    found = _OWNED.fullmatch(name)
    return found[1] if found is not None else None


def is_replaced(name: str) -> bool:
    """Whether it is what somebody has put aside to replace it, and no draft."""
    return is_temporary(name) and name.split(".")[-2] == OLD


def is_in_use(path: Path, generation: int, token: str) -> bool:
    """Whether somebody may still want this draft, or this buffer beside checkpoints.

    What a process on this machine writes, as long as it runs. Else, of our own token, what this generation writes; of
    our job's other runs, nothing. And whatever is young: it may be a training's on another machine, and we only want to
    see how that is.
    """
    found, theirs = parse_draft(path.name), path.name.split(".")[-2]
    owner = owner_of(path.name)
    if owner is not None and (runs := still_runs(owner)) is not None:
        return runs
    if theirs == token:
        return found is None or found[1] == generation
    if theirs in GOING or _is_our_job(theirs, token):
        return False
    if (runs := still_runs(theirs)) is not None:
        return runs
    return time.time() - _touched(path) < _YOUNG_S


def _is_our_job(theirs: str, ours: str) -> bool:
    one, other = _JOB.fullmatch(theirs), _JOB.fullmatch(ours)
    return one is not None and other is not None and one[1] == other[1]


def _touched(path: Path) -> float:
    """When something was last done to it, as far as that can be seen."""
    times = [0.0]
    with contextlib.suppress(OSError):
        times.append(path.stat().st_mtime)
        for each in path.iterdir() if path.is_dir() else ():
            # One that goes while we look is a sign of life in itself.
            with contextlib.suppress(OSError):
                times.append(each.stat().st_mtime)
    return max(times)


def _machine() -> str:
    """Where we are, as far as processes see each other: containers of one machine may have its name in common."""
    try:
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        space = 0
    return f"{re.sub(r'[^0-9A-Za-z]', '-', socket.gethostname())}-{space}"


def _started(pid: int) -> str | None:
    """When a process began, which tells it from a later one of the same number; None: there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None
