"""The frameworks by name: what the launcher must know of each before it imports the adapter.

Other packages add theirs through the entry-point group ``elastic_adapter.adapters``: each entry point is named after
the framework and points to an ``Entry``. They are looked at only when a name is not built in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from elastic_adapter.core.errors import UserError
from elastic_adapter.core.ports import Adapter

GROUP = "elastic_adapter.adapters"


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line and the machine tell an adapter."""

    # The names of the signals that the launcher passes on, as in SIGTERM.
    signals: tuple[str, ...] = ()
    virtual_local_rank: bool = False
    # How many GPUs this node's workers see, where the entry asks for it.
    gpus: int = 0
    # The devices that the user chose, as numbers among the visible ones, and their kind: gpu, xpu or npu.
    devices: tuple[str, ...] = ()
    device_kind: str = "gpu"
    # Where the workers' files go, for those who look for it.
    log_dir: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    # "module:function", imported on use; the function takes Options and gives an Adapter.
    create: str
    # What the framework is imported as, and the extra that installs it; None where nothing is needed.
    module: str | None = None
    extra: str | None = None
    max_restarts: int = 0
    # Exit codes by which a worker asks to be started again; not charged to the budget.
    restart_codes: tuple[int, ...] = ()
    # Whether the adapter wants to know the number of GPUs; counting them takes a moment.
    counts_gpus: bool = False


BUILT_IN: tuple[Entry, ...] = (
    Entry("torch", "elastic_adapter.adapters.pytorch.launch:create", module="torch", extra="torch"),
    Entry(
        "paddle",
        "elastic_adapter.adapters.paddlepaddle.launch:create",
        module="paddle",
        extra="paddle",
        max_restarts=3,
        restart_codes=(101, 102),
        counts_gpus=True,
    ),
    Entry("plain", "elastic_adapter.adapters.plain:create"),
)


def find(name: str) -> Entry:
    """The entry of this name; a ``UserError`` that lists the known ones where there is none."""
    for entry in BUILT_IN:
        if entry.name == name:
            return entry
    return _installed(name)


def load(entry: Entry, options: Options) -> Adapter:
    """The adapter itself; its module is imported now."""
    from importlib import import_module

    module, _, function = entry.create.partition(":")
    create = cast(Callable[[Options], Adapter], getattr(import_module(module), function))
    return create(options)


def _installed(name: str) -> Entry:
    from importlib.metadata import entry_points

    points = {point.name: point for point in entry_points(group=GROUP)}
    if name not in points:
        known = ", ".join([*(entry.name for entry in BUILT_IN), *sorted(points)])
        raise UserError(f"unknown framework {name!r}: expected one of {known}")
    try:
        entry = points[name].load()
    except (ImportError, AttributeError) as error:
        raise UserError(f"framework {name!r}: its entry point {points[name].value} can't be loaded: {error}") from error
    if not isinstance(entry, Entry):
        raise UserError(f"framework {name!r}: its entry point {points[name].value} is not a registry Entry")
    return entry
