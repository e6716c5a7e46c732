"""Pauses Python's garbage collector: where many values are made and none is dropped, it looks for nothing."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """For what takes a moment, and makes a few objects for each tensor of a state: most of its time would be this."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
