"""Where the workers' output goes: torchrun's -r, -t, --local-ranks-filter and --log-dir."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from elastic_adapter.core.config import STDERR, STDOUT, OutputConfig
from elastic_adapter.launchers.settings import Given

_BOTH = STDOUT | STDERR


def output(
    values: Mapping[str, Given], slots: int, *, worker_logs: bool = False, overwrite: bool = False
) -> OutputConfig:
    """``worker_logs``: a folder that is given holds Paddle's files, begun anew where ``overwrite`` is set."""
    redirects = _by_rank(values["redirects"], slots)
    tees = _by_rank(values["tee"], slots)
    shown = shown_ranks(values["local-ranks-filter"], slots)
    log_dir = values["log-dir"].text or None
    if log_dir == os.devnull:
        log_dir, redirects, tees = None, (0,) * slots, (0,) * slots
    elif log_dir is not None:
        _check_folder(values["log-dir"], log_dir)
        if not values["redirects"].explicit and not values["tee"].explicit:
            tees = (_BOTH,) * slots
    return OutputConfig(
        to_console=tuple((_BOTH & ~redirects[rank]) | tees[rank] if rank in shown else 0 for rank in range(slots)),
        to_file=tuple(redirects[rank] | tees[rank] for rank in range(slots)),
        log_dir=log_dir,
        worker_logs=worker_logs and log_dir is not None,
        overwrite=worker_logs and log_dir is not None and overwrite,
        prefix=values["log-prefix"].text or "",
        stdout_filters=filters(values["duplicate-stdout-filters"].text or ""),
        stderr_filters=filters(values["duplicate-stderr-filters"].text or ""),
    )


def _by_rank(given: Given, slots: int) -> tuple[int, ...]:
    """One value for all local ranks, such as 3, or a list for some, such as 0:1,2:3."""
    text = (given.text or "").strip()
    if re.fullmatch("[0-3]", text):
        return (int(text),) * slots
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text, re.ASCII):
        raise given.wrong("0 to 3 (1 stdout, 2 stderr, 3 both), or a list such as 0:1,1:3 by local rank")
    chosen = {int(rank): int(what) for rank, _, what in (pair.partition(":") for pair in text.split(","))}
    return tuple(chosen.get(rank, 0) for rank in range(slots))


def shown_ranks(given: Given, slots: int) -> frozenset[int]:
    """The local ranks that appear on the console."""
    if not given.text:
        return frozenset(range(slots))
    try:
        wanted = {int(item) for item in given.text.split(",")}
    except ValueError:
        raise given.wrong("a list of local ranks such as 0,1") from None
    return frozenset(range(slots)) & wanted


def filters(text: str) -> tuple[str, ...]:
    """A comma list in which ",," stands for a comma; empty items would match every line and are left out.

    >>> filters("loss,,acc,error")
    ('loss,acc', 'error')
    """
    items = text.replace(",,", "\0").split(",")
    return tuple(item.replace("\0", ",") for item in items if item)


def make_folder(folder: str, origin: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        given = Given("log-dir", folder, origin)
        raise given.wrong("a folder that can be made", error.strerror or str(error)) from error


def _check_folder(given: Given, folder: str) -> None:
    """Whether the folder is there, or can be made, without making it."""
    path = os.path.abspath(folder)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    if not os.path.isdir(path):
        raise given.wrong("a folder", f"{path} is not one")
    if not os.access(path, os.W_OK | os.X_OK):
        raise given.wrong("a folder that can be written", f"no permission to write in {path}")
