"""Who runs this process, as far as checkpoints are concerned: our launcher's agent, or nobody that would help."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from elastic_adapter.core.checkpoint.framework import Group
from elastic_adapter.core.checkpoint.link import Link

# As core.worker and core.progress have it: the process that tells is the last of four numbers.
_PAGE = struct.Struct("qqqq")


def connect(group: Group, *, polled: bool = False) -> Link:
    """``polled`` says whether it may be a matter of time when to save, so that all ranks have to be asked."""
    told = {"ELASTIC_NOTICES", "ELASTIC_SAVE_PAGE"} <= os.environ.keys()
    if told and _is_worker():
        from elastic_adapter.core.checkpoint.agent_link import AgentLink  # type: ignore[import-not-found, unused-ignore]

        link: Link = AgentLink()
        return link
    from elastic_adapter.core.checkpoint.own_link import OwnLink

    # A program that a worker has started has the worker's variables, and is no rank.
    return OwnLink(None if told else group, polled=polled)


def _is_worker() -> bool:
    """A child of a worker has the same variables; the page of progress says whose they are."""
    try:
        owner = _PAGE.unpack(Path(os.environ["ELASTIC_PROGRESS"]).read_bytes()[: _PAGE.size])[3]
    except (KeyError, OSError, struct.error):
        return True
    return owner in (0, os.getpid()) or not os.path.exists(f"/proc/{owner}")
