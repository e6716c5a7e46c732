"""Reads pickles without running them: an interpreter of pickle's instructions that builds plain values only.

What a pickle wants to import is looked up by name in a table that the file's format supplies, and never imported. What
stands in the table is a constant or a function of ours that makes a placeholder. Anything else is refused by its name.
A long string of bytes is left where it is in the file. The work and the memory that a file can cost are bounded by its
size.
"""

from __future__ import annotations

import pickle
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any, ClassVar, TypeVar

from elastic_adapter.core.checkpoint.files import Damaged, Refused
from elastic_adapter.core.checkpoint.sources import LONG, Blob, Source, Span, plain
from elastic_adapter.core.checkpoint.trees import DEEPEST, check_depth, culprit
from elastic_adapter.core.errors import in_one_line

_U8, _U16, _U32, _U64, _I32 = (struct.Struct(form) for form in ("B", "<H", "<I", "<Q", "<i"))
_FLOAT = struct.Struct(">d")
_SCALARS = (str, int, float, bytes, complex, type(None))
# What pickle raises for what it does not write: a lock, an object that objects, a dict that another thread changes.
_UNPICKLED = (pickle.PicklingError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)
_FARTHEST = 20
# The longest tuple that may be a key: each use of one is as much work.
_LONGEST_KEY = 100
# With how many others of the same hash a key may be compared, for each byte of it. In honest dicts it is a few: powers
# of two, say.
_COMPARED = 16
# Whoever writes a file does not know the hashes of these, or there are too few of them.
_SAFE_KEYS = frozenset((str, bytes, bool, type(None)))
_SMALL = 1 << 60
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """A name that a pickle may import; call is what stands for calling it, if that is allowed."""

    name: str
    call: Callable[..., object] | None = None


class Unwanted(Exception):
    """What a pickle asks for is not allowed in its format; the message names it."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A value of the framework, by its name and what it is made from: torch.float32, or torch.device of ("cpu",)."""

    name: str
    arguments: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a format allows beyond plain values."""

    names: Mapping[str, Known | Constant]
    # What a placeholder is completed with, by its type.
    build: Mapping[type, Callable[[Any, object], None]]
    # What stands for a persistent id; None: the format has none.
    persistent: Callable[[object], object] | None = None


class Machine:
    """Runs the instructions of one pickle."""

    def __init__(self, source: Source, grammar: Grammar) -> None:
        self._source = source
        self._grammar = grammar
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._keys = _Keys(_COMPARED * (source.size + LONG))
        # How much may be copied by calls and changes, so that a value that is named a million times is not copied as
        # often. Each byte may be twice: protocol 2 makes a bytearray or an array from bytes, and those from a text.
        self._budget = 2 * source.size + LONG

    def run(self) -> Any:
        read, actions = self._source.read, self._ACTIONS
        try:
            while (code := read(1)) != pickle.STOP:
                action = actions.get(code)
                if action is None:
                    self._unknown(code)
                else:
                    action(self)
            (value,) = self._stack
        except Unwanted as unwanted:
            raise Refused(self._source.path, str(unwanted)) from None
        except RecursionError:
            raise Refused(self._source.path, "calls within calls, more than Python can follow") from None
        except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, struct.error) as error:
            raise Damaged(self._source.path, f"its pickle makes no sense ({type(error).__name__}: {error})") from error
        if self._below:
            raise Damaged(self._source.path, "its pickle ends early")
        return value

    def _unknown(self, code: bytes) -> None:
        if code == pickle.INST:
            self._import(self._text_line(), self._text_line())
        name = next((name for name in pickle.__all__ if getattr(pickle, name) == code), None)
        if name is None:
            raise Damaged(self._source.path, f"its pickle holds an unknown instruction, {code!r}")
        raise Refused(self._source.path, f"pickle's {name}")

    def _number(self, form: struct.Struct) -> Any:
        return form.unpack(self._source.read(form.size))[0]

    def _text_line(self) -> str:
        return self._source.line().decode()

    def _marked(self) -> list[Any]:
        items = self._stack
        self._stack = self._below.pop()
        return items

    # Instructions: what is on the stack already is described in pickletools.

    def _skip_protocol(self) -> None:
        if self._source.read(1)[0] > pickle.HIGHEST_PROTOCOL:
            raise Damaged(self._source.path, "its pickle is of an unknown protocol")

    def _skip_frame(self) -> None:
        self._source.read(8)

    def _mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _long(self) -> None:
        self._stack.append(int.from_bytes(self._source.read(self._source.read(1)[0]), "little", signed=True))

    def _text(self, form: struct.Struct) -> None:
        self._stack.append(self._source.read(self._number(form)).decode("utf-8", "surrogatepass"))

    def _old_text(self, form: struct.Struct) -> None:
        """A string of Python 2, whose bytes are kept one to one."""
        self._stack.append(self._source.read(self._number(form)).decode("latin1"))

    def _bytes(self, form: struct.Struct) -> None:
        self._stack.append(self._source.payload(self._number(form)))

    def _bytearray(self) -> None:
        self._stack.append(bytearray(self._source.read(self._number(_U64))))

    def _tuple(self) -> None:
        items = self._marked()
        self._stack.append(tuple(items))

    def _short_tuple(self, count: int) -> None:
        items = self._stack[-count:]
        if len(items) != count:
            raise IndexError("too few values for a tuple")
        self._stack[-count:] = [tuple(items)]

    def _append(self) -> None:
        self._extend([self._stack.pop()])

    def _appends(self) -> None:
        self._extend(self._marked())

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise TypeError(f"{_kind(target)} is no list")
        target.extend(items)

    def _add_items(self) -> None:
        items = self._marked()
        target = self._stack[-1]
        if type(target) is not set:
            raise TypeError(f"{_kind(target)} is no set")
        target.update(self._keys.checked(items))

    def _frozenset(self) -> None:
        items = self._marked()
        self._stack.append(frozenset(self._keys.checked(items)))

    def _set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._update([key, value])

    def _set_items(self) -> None:
        self._update(self._marked())

    def _update(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) not in (dict, OrderedDict, Counter):
            raise TypeError(f"{_kind(target)} is no dict")
        for key, value in zip(self._keys.checked(items[::2]), items[1::2], strict=True):
            target[key] = value

    def _get(self, form: struct.Struct) -> None:
        self._stack.append(self._memo[self._number(form)])

    def _put(self, form: struct.Struct) -> None:
        self._memo[self._number(form)] = self._stack[-1]

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _global(self) -> None:
        self._import(self._text_line(), self._text_line())

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not (isinstance(module, str) and isinstance(name, str)):
            raise TypeError("a name is no string")
        self._import(module, name)

    def _import(self, module: str, name: str) -> None:
        # As pickle does for what Python 2 wrote, and protocol 2 still writes.
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        full = f"{module}.{name}"
        if full not in self._grammar.names:
            raise Refused(self._source.path, full)
        self._stack.append(self._grammar.names[full])

    def _reduce(self) -> None:
        arguments = self._stack.pop()
        function = self._stack[-1]
        if not isinstance(function, Known) or function.call is None:
            raise Refused(self._source.path, f"a call of {_kind(function)}")
        if type(arguments) is not tuple:
            raise TypeError("arguments are no tuple")
        self._spend(len(arguments), f"calls of {function.name}")
        arguments = tuple(map(plain, arguments))
        self._spend(_lengths(arguments), f"calls of {function.name}")
        self._stack[-1] = function.call(*arguments)

    def _build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        build = self._grammar.build.get(type(target))
        if build is None:
            raise Refused(self._source.path, f"a change of {_kind(target)}")
        # An array is described by a tuple, whose items are looked at as well.
        self._spend(_lengths((state, *state) if type(state) is tuple else (state,)), f"changes of {_kind(target)}")
        build(target, state)

    def _spend(self, count: int, on: str) -> None:
        self._budget -= count
        if self._budget < 0:
            raise Refused(self._source.path, f"more {on} than its size explains")

    def _persistent(self) -> None:
        if self._grammar.persistent is None:
            raise Refused(self._source.path, "an object from outside of the file")
        self._stack.append(self._grammar.persistent(self._stack.pop()))

    # Protocols 2 to 5, without what no plain state needs: objects made from a class and its parts (NEWOBJ, OBJ, INST),
    # the registry of extensions, and buffers from outside.
    _ACTIONS: ClassVar[Mapping[bytes, Callable[[Machine], None]]] = {
        pickle.PROTO: _skip_protocol,
        pickle.FRAME: _skip_frame,
        pickle.MARK: _mark,
        pickle.NONE: lambda self: self._stack.append(None),
        pickle.NEWTRUE: lambda self: self._stack.append(True),
        pickle.NEWFALSE: lambda self: self._stack.append(False),
        pickle.BININT: lambda self: self._stack.append(self._number(_I32)),
        pickle.BININT1: lambda self: self._stack.append(self._number(_U8)),
        pickle.BININT2: lambda self: self._stack.append(self._number(_U16)),
        pickle.BINFLOAT: lambda self: self._stack.append(self._number(_FLOAT)),
        pickle.LONG1: _long,
        pickle.BINUNICODE: lambda self: self._text(_U32),
        pickle.SHORT_BINUNICODE: lambda self: self._text(_U8),
        pickle.BINUNICODE8: lambda self: self._text(_U64),
        pickle.BINSTRING: lambda self: self._old_text(_U32),
        pickle.SHORT_BINSTRING: lambda self: self._old_text(_U8),
        pickle.BINBYTES: lambda self: self._bytes(_U32),
        pickle.SHORT_BINBYTES: lambda self: self._bytes(_U8),
        pickle.BINBYTES8: lambda self: self._bytes(_U64),
        pickle.BYTEARRAY8: _bytearray,
        pickle.EMPTY_TUPLE: lambda self: self._stack.append(()),
        pickle.EMPTY_LIST: lambda self: self._stack.append([]),
        pickle.EMPTY_DICT: lambda self: self._stack.append({}),
        pickle.EMPTY_SET: lambda self: self._stack.append(set()),
        pickle.TUPLE: _tuple,
        pickle.TUPLE1: lambda self: self._short_tuple(1),
        pickle.TUPLE2: lambda self: self._short_tuple(2),
        pickle.TUPLE3: lambda self: self._short_tuple(3),
        pickle.APPEND: _append,
        pickle.APPENDS: _appends,
        pickle.ADDITEMS: _add_items,
        pickle.FROZENSET: _frozenset,
        pickle.SETITEM: _set_item,
        pickle.SETITEMS: _set_items,
        pickle.BINGET: lambda self: self._get(_U8),
        pickle.LONG_BINGET: lambda self: self._get(_U32),
        pickle.BINPUT: lambda self: self._put(_U8),
        pickle.LONG_BINPUT: lambda self: self._put(_U32),
        pickle.MEMOIZE: _memoize,
        pickle.GLOBAL: _global,
        pickle.STACK_GLOBAL: _stack_global,
        pickle.REDUCE: _reduce,
        pickle.BUILD: _build,
        pickle.BINPERSID: _persistent,
    }


# What several formats allow to be called.


def ordered_dict(items: Any = ()) -> OrderedDict[Any, Any]:
    pairs = [(key, value) for key, value in items]
    keys = _called_keys([key for key, _ in pairs])
    return OrderedDict(zip(keys, [value for _, value in pairs], strict=True))


def set_attributes(target: OrderedDict[Any, Any], state: object) -> None:
    """A module's state is an OrderedDict with an attribute, _metadata. Any other could pass for what it is not."""
    if type(state) is not dict or any(type(name) is not str for name in state):
        raise TypeError("an OrderedDict can't be changed like this")
    if others := [name for name in state if name != "_metadata"]:
        raise Unwanted(f"an OrderedDict with the attribute {others[0][:50]!r}")
    target.__dict__.update(state)


def set_of(items: Any = ()) -> set[Any]:
    if type(items) not in (list, tuple):
        raise TypeError("a set is made from a list")
    return set(_called_keys(list(items)))


def encode(text: object, encoding: object) -> bytes:
    """How protocol 2 writes bytes: as a string of as many characters."""
    if type(text) is not str or encoding != "latin1":
        raise TypeError("bytes are made from latin1")
    return text.encode("latin1")


def bytearray_of(data: object = b"") -> bytearray:
    if not isinstance(data, bytes):
        raise TypeError("a bytearray is made from bytes")
    return bytearray(data)


PLAIN_NAMES: Mapping[str, Known | Constant] = {
    known.name: known
    for known in (
        Known("collections.OrderedDict", ordered_dict),
        Known("builtins.set", set_of),
        Known("builtins.bytearray", bytearray_of),
        Known("builtins.complex", lambda real, imaginary: complex(float(real), float(imaginary))),
        Known("_codecs.encode", encode),
    )
}


def check_import(value: object, allowed: Mapping[str, object]) -> None:
    """Refuses a class or a function that a pickle of a state would import; called by the one who makes the pickle."""
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        name = f"{value.__module__}.{value.__qualname__}"
        if name not in allowed:
            raise Refused("the state", name)


def made_from(state: object, make: Callable[[object], _Made]) -> _Made:
    """What is made of a state by pickling it. Refused, with the place of what is wrong, where that can't be done."""
    try:
        return _made(state, make)
    except Refused as refused:
        raise Refused(culprit(state, _Search(make).check), refused.wanted) from None


def _made(state: object, make: Callable[[object], _Made]) -> _Made:
    try:
        check_depth("the state", state)
        return make(state)
    except Damaged:
        raise Refused("the state", f"more than {DEEPEST} levels of nesting") from None
    except _UNPICKLED as error:
        words = f"{type(error).__name__}: {in_one_line(error)}"
        raise Refused("the state", f"what can't be pickled ({words})") from error


class _Search:
    """Looks for what is refused, so many levels down: people find the rest, and a list may hold itself."""

    def __init__(self, make: Callable[[object], object]) -> None:
        self._make = make
        self._left = _FARTHEST

    def check(self, child: object) -> None:
        try:
            _made(child, self._make)
        except Refused:
            self._left -= 1
            if self._left >= 0:
                raise


class _Keys:
    """Checks that values are safe to hash.

    The interpreter does not survive the hash of a tuple that is nested too deeply. And each key is compared with those
    of the same hash: where thousands share one, which is easy to arrange with large numbers, a dict takes for ever.
    """

    def __init__(self, comparisons: int) -> None:
        self._left = comparisons
        # By their hash: the first key, and all of them where there are several.
        self._first: dict[int, Any] = {}
        self._alike: dict[int, set[Any]] = {}

    def checked(self, items: list[Any]) -> list[Any]:
        return items if _SAFE_KEYS.issuperset(map(type, items)) else [self._checked(item) for item in items]

    def _checked(self, item: Any) -> Any:
        if type(item) in _SAFE_KEYS or (type(item) is int and -_SMALL < item < _SMALL):
            return item
        if type(item) is not tuple:
            item = plain(item)
        elif len(item) > _LONGEST_KEY:
            raise TypeError(f"a tuple of {len(item)} values can't be a key")
        elif any(isinstance(part, Blob | Span) for part in item):
            item = tuple(map(plain, item))
        if not all(isinstance(part, (*_SCALARS, Constant)) for part in (item if type(item) is tuple else (item,))):
            raise TypeError(f"{_kind(item)} can't be a key")
        if type(item) not in _SAFE_KEYS:
            self._count(item)
        return item

    def _count(self, item: Any) -> None:
        number = hash(item)
        first = self._first.setdefault(number, item)
        if first is item or first == item:
            return
        alike = self._alike.setdefault(number, {first})
        alike.add(item)
        self._left -= len(alike) * (len(item) if type(item) is tuple else 1)
        if self._left < 0:
            raise ValueError("too many keys have the same hash")


def _called_keys(items: list[Any]) -> list[Any]:
    """Those of a call. Its arguments are counted: each is as much as some bytes."""
    return _Keys(4 * _COMPARED * len(items)).checked(items)


def _lengths(values: Iterable[Any]) -> int:
    return sum(len(value) for value in values if hasattr(value, "__len__"))


def _kind(value: object) -> str:
    return value.name if isinstance(value, Known | Constant) else f"a value of the type {type(value).__name__}"
