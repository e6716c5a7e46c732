"""Walks over states: nested dicts, lists and tuples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import UnionType
from typing import Any, TypeAlias

from elastic_adapter.core.checkpoint.files import Damaged, Refused

# No state is nested like this. Whoever has listed the leaves of one may recurse over it.
DEEPEST = 100
# So many characters of a key are part of names, and a name has so many: all that is below a key has it in its name.
_LONGEST_KEY = 1000
_LONGEST_NAME = 2000
# Most of what states hold beside tensors: a walk for something else passes over a million of these at once.
_NUMBERS_AND_TEXTS = (int, float, bool, str, bytes, type(None))
_UNFINISHED = object()

_Types: TypeAlias = type | UnionType | tuple[type, ...]


def leaves(path: str, tree: object, wanted: _Types = object) -> Iterator[tuple[str, Any]]:
    """All values of the wanted types that are no containers, with names such as optimizer/state/0/step.

    A container that is there twice is entered once, so the work is bounded by what the pickle wrote down.
    """
    children = _children(tree)
    if children is None:
        if isinstance(tree, wanted):
            yield "", tree
        return
    passed = _passed(wanted)
    way = _Way()
    entered = {id(tree)}
    pending = [children]
    while pending:
        for key, value in pending[-1]:
            if type(value) in passed:
                continue
            children = _children(value)
            if children is None:
                if isinstance(value, wanted):
                    yield join(way.name(), key), value
            elif id(value) not in entered:
                entered.add(id(value))
                _check_depth(path, len(pending))
                if not passed.issuperset(map(type, _values(value))):
                    way.enter(key)
                    pending.append(children)
                    break
        else:
            pending.pop()
            way.leave()


def replace(path: str, tree: Any, wanted: _Types, change: Callable[[str, Any], Any]) -> Any:
    """The tree with each value of the wanted types changed that is no list or dict: these are kept, with new content.

    A tuple is changed when its items have been, so it can't hold itself: then Refused is raised.
    """
    return _Replacement(path, wanted, change).of(tree)


def check_depth(path: str, tree: object) -> None:
    """Raises Damaged where the tree is nested too deeply."""
    for _ in leaves(path, tree, ()):
        pass


def culprit(tree: object, check: Callable[[object], object], name: str = "") -> str:
    """Where in a state, that a check refuses as a whole, lies what it refuses."""
    for key, child in _children(tree) or ():
        try:
            check(child)
        except Refused:
            return culprit(child, check, join(name, key))
    return f"the state at {name}" if name else "the state"


def join(name: str, key: object) -> str:
    """The name of what is there, which is short even where the key is not."""
    last = key[:_LONGEST_KEY] if type(key) is str else _described(key)
    return (f"{name}/{last}" if name else last)[:_LONGEST_NAME]


class _Replacement:
    """One walk that changes what it finds."""

    def __init__(self, path: str, wanted: _Types, change: Callable[[str, Any], Any]) -> None:
        self._path = path
        self._wanted = wanted
        self._change = change
        self._passed = _passed(wanted)
        self._way = _Way()
        # What became of each container, and the container itself: its id must not be given to another one.
        self._done: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        """What becomes of the value that the walk is at."""
        if _children(value) is None:
            return self._changed(value)
        if id(value) in self._done:
            made = self._done[id(value)][1]
            if made is _UNFINISHED:
                raise Refused(self._path, "a tuple that holds itself")
            return made
        _check_depth(self._path, self._way.depth)
        if type(value) is tuple:
            self._done[id(value)] = value, _UNFINISHED
            made = self._changed(_with(value, dict(self._changes(value))))
            self._done[id(value)] = value, made
            return made
        self._done[id(value)] = value, value
        for key, made in self._changes(value):
            value[key] = made
        return value

    def _changes(self, container: Any) -> Iterator[tuple[Any, object]]:
        """What is to be put into a container. Nothing else is: where keys were made to collide, that is work."""
        if self._passed.issuperset(map(type, _values(container))):
            return
        for key, value in _children(container) or ():
            if type(value) not in self._passed:
                self._way.enter(key)
                made = self.of(value)
                self._way.leave()
                if made is not value:
                    yield key, made

    def _changed(self, value: Any) -> Any:
        return self._change(self._way.name(), value) if isinstance(value, self._wanted) else value


class _Way:
    """The keys that lead to where a walk is. Names are made of them when somebody asks: few values are tensors."""

    def __init__(self) -> None:
        self._keys: list[object] = []
        # Of the root, and of as many of those below it as are known.
        self._names = [""]

    @property
    def depth(self) -> int:
        return len(self._keys)

    def enter(self, key: object) -> None:
        self._keys.append(key)

    def leave(self) -> None:
        """Nothing is above the root, where a walk ends."""
        if self._keys:
            self._keys.pop()
            del self._names[len(self._keys) + 1 :]

    def name(self) -> str:
        for key in self._keys[len(self._names) - 1 :]:
            self._names.append(join(self._names[-1], key))
        return self._names[-1]


def _with(items: tuple[Any, ...], changes: Mapping[int, Any]) -> tuple[Any, ...]:
    return tuple(changes.get(at, item) for at, item in enumerate(items)) if changes else items


def _described(key: object) -> str:
    """A key as Python writes it, as far as it is part of a name: the rest may be a thousand times as long."""
    if type(key) is bytes:
        return repr(key[:_LONGEST_KEY])
    if type(key) is tuple:
        text = "("
        for at, item in enumerate(key):
            text += (", " if at else "") + (repr(item[:_LONGEST_KEY]) if type(item) is str else _described(item))
            if len(text) > _LONGEST_KEY:
                return text[:_LONGEST_KEY]
        return text + (",)" if len(key) == 1 else ")")
    try:
        return repr(key)[:_LONGEST_KEY]
    except ValueError:
        return "a number of too many digits to write down"


def _check_depth(path: str, depth: int) -> None:
    if depth >= DEEPEST:
        raise Damaged(path, f"it is nested deeper than {DEEPEST} levels")


def _passed(wanted: _Types) -> frozenset[type]:
    return frozenset(kind for kind in _NUMBERS_AND_TEXTS if not issubclass(kind, wanted))


def _children(value: Any) -> Iterator[tuple[Any, object]] | None:
    if isinstance(value, dict):
        return iter(dict.items(value))
    if type(value) in (list, tuple):
        return enumerate(value)
    return None


def _values(container: Any) -> Iterable[object]:
    return dict.values(container) if isinstance(container, dict) else container
