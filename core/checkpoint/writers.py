"""Who writes a draft, by the token in its name: that says when nobody will finish it any more."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import time
from pathlib import Path

from elastic_adapter.core.checkpoint.manifest import parse_draft

# Tokens of what is being deleted, by somebody who may have been killed over it.
GOING = PRUNED, SWEPT = "pruned", "swept"
_YOUNG_S = 3600.0
_PROCESS = re.compile(r"(.*)-([0-9]+)-([0-9]+)")
_JOB = re.compile(r"job-([0-9a-f]{16})-.*")


def own_token() -> str:
    """Of a program that runs alone: its host and its process."""
    return f"{_host()}-{os.getpid()}-{started(os.getpid())}"


def job_token(job: str, run: str) -> str:
    """Of one run of a job. A job has one at a time in its etcd, so that of another run is over.

    Without an etcd nobody sees to that: a run is known by its agent's process then.
    """
    if _PROCESS.fullmatch(run):
        return run
    return f"job-{_digest(job)}-{run}"


def is_in_use(path: Path, generation: int, token: str) -> bool:
    """Whether somebody may still want this draft, or this buffer beside checkpoints.

    Of our own token, what this generation writes; of our job's other runs, nothing. Of another one's, what a program on
    this machine writes that still runs; and whatever is young: it may be a training's on another machine, and we only
    want to see how that is.
    """
    found = parse_draft(path.name)
    if f".{token}." in path.name:
        return found is None or found[1] == generation
    theirs = path.name.split(".")[-2]
    if theirs in GOING:
        return False
    if (job := _JOB.fullmatch(theirs)) is not None and (ours := _JOB.fullmatch(token)) is not None:
        if job[1] == ours[1]:
            return False
    elif (process := _PROCESS.fullmatch(theirs)) is not None and process[1] == _host():
        return started(int(process[2])) == process[3]
    return time.time() - _touched(path) < _YOUNG_S


def started(pid: int) -> str | None:
    """When a process began, which tells it from a later one of the same number; None: there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


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


def _digest(job: str) -> str:
    return hashlib.blake2s(job.encode(), digest_size=8).hexdigest()


def _host() -> str:
    return re.sub(r"[^0-9A-Za-z]", "-", socket.gethostname())
