"""Walks over states: nested dicts, lists and tuples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from elastic_adapter.core.checkpoint.files import Damaged, Refused

# No state is nested like this. Whoever has listed the leaves of one may recurse over it.
DEEPEST = 100


def leaves(path: str, tree: object) -> Iterator[tuple[str, object]]:
    """All values that are no containers, with names such as optimizer/state/0/step.

    A container that is there twice is entered once, so the work is bounded by what the pickle wrote down.
    """
    entered: set[int] = set()
    pending: list[tuple[str, int, object]] = [("", 0, tree)]
    while pending:
        name, depth, value = pending.pop()
        children = _children(value)
        if children is None:
            yield name, value
        elif id(value) not in entered:
            entered.add(id(value))
            if depth >= DEEPEST:
                raise Damaged(path, f"it is nested deeper than {DEEPEST} levels")
            named = [(join(name, key), depth + 1, child) for key, child in children]
            pending.extend(reversed(named))


def replace(tree: Any, change: Callable[[str, Any], Any]) -> Any:
    """The tree with each value changed that is no list or dict: these are kept, with changed content.

    A tuple is changed when its items have been. Only for trees whose leaves were listed before: that bounds the depth.
    """
    # What became of each container, and the container itself: its id must not be given to another one.
    done: dict[int, tuple[Any, Any]] = {}

    def visit(name: str, value: Any) -> Any:
        if id(value) in done:
            return done[id(value)][1]
        if isinstance(value, dict):
            done[id(value)] = value, value
            for key, child in dict.items(value):
                value[key] = visit(join(name, key), child)
            return value
        if type(value) is list:
            done[id(value)] = value, value
            value[:] = [visit(join(name, at), child) for at, child in enumerate(value)]
            return value
        if type(value) is tuple:
            made = change(name, tuple(visit(join(name, at), child) for at, child in enumerate(value)))
            done[id(value)] = value, made
            return made
        return change(name, value)

    return visit("", tree)


def culprit(tree: object, check: Callable[[object], object], name: str = "") -> str:
    """Where in a state, that a check refuses as a whole, lies what it refuses."""
    for key, child in _children(tree) or ():
        try:
            check(child)
        except Refused:
            return culprit(child, check, join(name, key))
    return f"the state at {name}" if name else "the state"


def join(name: str, key: object) -> str:
    last = key if type(key) is str else repr(key)
    return f"{name}/{last}" if name else last


def _children(value: Any) -> list[tuple[object, object]] | None:
    if isinstance(value, dict):
        return list(dict.items(value))
    if type(value) in (list, tuple):
        return list(enumerate(value))
    return None
