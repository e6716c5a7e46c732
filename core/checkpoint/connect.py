"""Who runs this process, as far as checkpoints are concerned: our launcher's agent, or nobody that would help."""

from __future__ import annotations

import logging
import os
import struct
from pathlib import Path

from elastic_adapter.core.checkpoint.framework import Group
from elastic_adapter.core.checkpoint.link import Link

log = logging.getLogger(__name__)

# As core.worker and core.progress have it: the process that tells is the last of four numbers.
_PAGE = struct.Struct("qqqq")


def connect(group: Group, root: str, *, polled: bool = False) -> Link:
    """``polled`` says whether it may be a matter of time when to save, so that all ranks have to be asked."""
    told = {"ELASTIC_NOTICES", "ELASTIC_SAVE_PAGE"} <= os.environ.keys()
    is_worker = told and _is_worker()
    if is_worker and _is_kept(root):
        from elastic_adapter.core.checkpoint.agent_link import AgentLink  # type: ignore[import-not-found, unused-ignore]

        link: Link = AgentLink(group=group)
        return link
    from elastic_adapter.core.checkpoint.own_link import OwnLink

    # A program that a worker has started has the worker's variables, and is no rank.
    return OwnLink(group if is_worker or not told else None, polled=polled)


# The folder whose checkpoints the launcher keeps, by its socket and the generation: the first one. A launcher goes on
# from one checkpoint.
_kept: dict[tuple[str, str], str] = {}


def _is_kept(root: str) -> bool:
    """By the order in which folders come: nodes may have the same one under different names, and all ranks have to
    agree without a word.
    """
    kept = _kept.setdefault((os.environ["ELASTIC_NOTICES"], os.environ["ELASTIC_GENERATION"]), root)
    if kept != root:
        log.warning(
            "the launcher keeps the checkpoints of %s; those of %s are saved and restored as without it: not on notice",
            kept,
            root,
        )
    return kept == root


def _is_worker() -> bool:
    """A child of a worker has the same variables; the page of progress says whose they are."""
    try:
        owner = _PAGE.unpack(Path(os.environ["ELASTIC_PROGRESS"]).read_bytes()[: _PAGE.size])[3]
    except (KeyError, OSError, struct.error):
        return True
    return owner in (0, os.getpid()) or not os.path.exists(f"/proc/{owner}")
