"""Paddle's checkpoint files, without paddle: written from a skeleton and the bytes of arrays, read into placeholders.

A .pdparams or .pdopt file is a pickle of numpy arrays in plain containers. ``paddle.load`` runs whatever such a pickle
asks for; here nothing is run. What is written is read by ``paddle.load``, and what is read may have been written by
anybody. See paddlestate for the two ends that need paddle.
"""

from __future__ import annotations

import math
import os
import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_adapter.core.checkpoint.files import Buffer, Damaged, Refused, Region, Skeleton, Written, flat, open_plain
from elastic_adapter.core.checkpoint.hashing import hasher
from elastic_adapter.core.checkpoint.pickles import PLAIN_NAMES, Grammar, Known, Machine, Unwanted, set_attributes
from elastic_adapter.core.checkpoint.sources import Blob, FileSource, Source, Span, TextSource, plain
from elastic_adapter.core.checkpoint.transfer import Output, Writable
from elastic_adapter.core.checkpoint.trees import leaves, replace

# Keys that paddle adds to a state: the names of its tensors, and what had to be cut for pickle's older protocols.
NAME_TABLE = "StructuredToParameterName@@"
CUT_TABLE = "UnpackBigParamInfor@@"

# numpy's codes for numbers, without the byte order, and what the standard library calls them.
_NUMBERS = {
    "b1": "?",
    "i1": "b",
    "i2": "h",
    "i4": "i",
    "i8": "q",
    "u1": "B",
    "u2": "H",
    "u4": "I",
    "u8": "Q",
    "f2": "e",
    "f4": "f",
    "f8": "d",
    "c8": "ff",
    "c16": "dd",
}
_MOST_DIMENSIONS = 64


@dataclass(slots=True, eq=False)
class ArrayRef:
    """A numpy array that was not built. Its bytes are in the file; in the oldest files they had to be decoded.

    The pickle says first that there is an array, and then what it is.
    """

    dtype: str = ""
    shape: tuple[int, ...] = ()
    fortran: bool = False
    parts: tuple[Span | bytes, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes if isinstance(part, Span) else len(part) for part in self.parts)

    @property
    def span(self) -> Span | None:
        """Where all of its bytes are, if they are in one piece."""
        match self.parts:
            case (Span() as span,):
                return span
            case _:
                return None


@dataclass(frozen=True, slots=True)
class TensorRef:
    """An array that paddle.load makes a tensor of; the name is the tensor's own, not the key."""

    array: ArrayRef
    name: str | None = None


@dataclass(frozen=True, slots=True)
class PaddleFile:
    """A file that was looked at: its state as paddle.load would give it, with placeholders."""

    path: str
    state: Any

    def regions(self) -> tuple[Region, ...]:
        return tuple(_regions(self.path, self.state))


@dataclass(slots=True, eq=False)
class _Dtype:
    code: str


def write_paddle(
    file: Writable, skeleton: Skeleton, payloads: Sequence[Buffer], *, algorithm: str = "xxh3_128"
) -> Written:
    """Writes the state whose skeleton is given, the bytes of its arrays taken from the payloads."""
    source = TextSource("the state", skeleton.text, skeleton)
    state = parse_paddle(source)
    source.finish()
    views = [flat(payload) for payload in payloads]
    if [hole.nbytes for hole in skeleton.holes] != [len(view) for view in views]:
        raise ValueError("the skeleton and its payloads do not agree")
    output = Output(file, algorithm)
    hashes: dict[int, str] = {}
    text, at = memoryview(skeleton.text), 0
    for hole, view in zip(skeleton.holes, views, strict=True):
        output.write(text[at : hole.at])
        at = hole.at
        hash, offset = hasher(algorithm), output.position
        output.write(view, hash)
        hashes[offset] = hash.hexdigest()
    output.write(text[at:])
    regions = tuple(
        Region(region.name, region.dtype, region.shape, region.offset, region.nbytes, hashes.get(region.offset))
        for region in _regions(source.path, state)
    )
    return Written(output.position, algorithm, output.hexdigest(), regions)


def read_paddle(path: str) -> PaddleFile:
    """Reads the pickle, and no long array. Raises Damaged or Refused."""
    fd = open_plain(path)
    try:
        return PaddleFile(path, parse_paddle(FileSource(path, fd)))
    finally:
        os.close(fd)


def parse_paddle(source: Source) -> Any:
    """The state as paddle.load would give it, with placeholders."""
    state = Machine(source, _GRAMMAR).run()
    arrays: dict[int, ArrayRef] = {}
    for name, leaf in leaves(source.path, state, ArrayRef | Known | _Dtype | Span):
        if isinstance(leaf, ArrayRef) and leaf.dtype:
            arrays[id(leaf)] = leaf
        elif not isinstance(leaf, Span) or leaf.read is None:
            raise Refused(source.path, f"{_describe(leaf)} as a value, at {name}")
    if sum(array.nbytes for array in arrays.values()) > source.size:
        raise Refused(source.path, "more bytes of arrays than it has")
    state = replace(source.path, state, Blob | Span, lambda _, leaf: plain(leaf))
    try:
        return _as_loaded(source.path, state)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(source.path, f"its tables of names make no sense ({type(error).__name__}: {error})") from error


def _as_loaded(path: str, state: Any) -> Any:
    """What paddle.load makes of a pickle: it puts together what was cut, and tells tensors from arrays."""
    if isinstance(state, dict):
        for key, cut in state.pop(CUT_TABLE, {}).items():
            state[key] = _joined([state.pop(_text(part)) for part in cut["slices"]], cut["OriginShape"])
        names = state.pop(NAME_TABLE, None)
        if names is not None:
            for key, name in names.items():
                if isinstance(state[key], ArrayRef):
                    state[key] = TensorRef(state[key], _text(name))
            return state
    pairs = 0

    def pair(_: str, value: Any) -> Any:
        nonlocal pairs
        match value:
            case (str(name), ArrayRef() as array):
                pairs += 1
                return TensorRef(array, name)
            case _:
                return value

    # Tensors outside of a plain dict of them are saved with their names; arrays beside such are the user's own.
    state = replace(path, state, tuple, pair)
    return state if pairs else replace(path, state, ArrayRef, lambda _, array: TensorRef(array))


def _text(value: object) -> str:
    if type(value) is not str:
        raise TypeError("a name is no text")
    return value


def _joined(pieces: list[ArrayRef], shape: tuple[int, ...]) -> ArrayRef:
    if len({piece.dtype for piece in pieces}) != 1:
        raise TypeError("parts of an array are of different types")
    if any(len(piece.parts) != 1 for piece in pieces):
        raise TypeError("parts of an array are made of parts")
    return _sized(ArrayRef(pieces[0].dtype, shape, False, tuple(part for piece in pieces for part in piece.parts)))


def _sized(array: ArrayRef) -> ArrayRef:
    """The array, if it has as many bytes as its shape says."""
    sizes = array.shape
    if type(sizes) is not tuple or len(sizes) > _MOST_DIMENSIONS:
        raise TypeError("an array has no shape")
    if not all(type(size) is int and 0 <= size < 1 << 63 for size in sizes):
        raise TypeError("an array's shape is not made of numbers")
    if math.prod(sizes) * int(array.dtype[2:]) != array.nbytes:
        raise ValueError("an array's shape and its bytes do not agree")
    return array


def _new_array(kind: object, *_: object) -> ArrayRef:
    if kind is not _NDARRAY:
        raise TypeError("an array is of an unknown class")
    return ArrayRef()


def _set_array(array: ArrayRef, state: object) -> None:
    match state:
        case (1, tuple(shape), _Dtype(code=code), bool(fortran), payload):
            found = _sized(ArrayRef(code, shape, fortran, (_part(payload),)))
            array.dtype, array.shape, array.fortran, array.parts = code, shape, fortran, found.parts
        case _:
            raise TypeError("an array is described in an unknown way")


def _part(payload: object) -> Span | bytes:
    match payload:
        case Blob():
            return Span(payload.offset, len(payload))
        case Span() | bytes():
            return payload
        case str():
            return payload.encode("latin1")
        case _:
            raise TypeError("an array has no bytes")


def _new_dtype(code: object, *_: object) -> _Dtype:
    # The interpreter does not survive the hash of any value, nor the text of any.
    if type(code) is not str:
        raise Unwanted(f"numpy.dtype of a value of the type {type(code).__name__}")
    if code not in _NUMBERS:
        # Arrays of objects above all: their elements would be pickles.
        raise Unwanted(f"numpy.dtype({code!r})")
    return _Dtype(f"|{code}")


def _set_dtype(dtype: _Dtype, state: object) -> None:
    match state:
        case (3, "<" | "|" as order, None, None, None, -1, -1, 0):
            dtype.code = f"{order}{dtype.code[1:]}"
        case _:
            raise Unwanted("numbers of another byte order, or numbers that are not plain")


def _scalar(dtype: object, data: object) -> object:
    """One number of numpy, as Python's own."""
    if not isinstance(dtype, _Dtype) or not isinstance(data, bytes | str):
        raise TypeError("a number is described in an unknown way")
    encoded = data.encode("latin1") if isinstance(data, str) else data
    values = struct.unpack(f"<{_NUMBERS[dtype.code[1:]]}", encoded)
    return complex(*values) if len(values) > 1 else values[0]


def _tuple(items: object) -> tuple[Any, ...]:
    """How paddle writes a tensor outside of a plain dict of tensors: as a name and an array."""
    if type(items) is not tuple:
        raise TypeError("a tuple is made from a tuple")
    return items


_NDARRAY = Known("numpy.ndarray")
_CALLS = (
    _NDARRAY,
    Known("numpy.dtype", _new_dtype),
    Known("builtins.tuple", _tuple),
    Known("builtins.bytes", lambda: b""),
    *(
        Known(f"numpy.{core}.multiarray.{name}", call)
        for core in ("core", "_core")
        for name, call in (("_reconstruct", _new_array), ("scalar", _scalar))
    ),
)
# Whatever a pickle may import.
NAMES = {**PLAIN_NAMES, **{known.name: known for known in _CALLS}}
_GRAMMAR = Grammar(
    names=NAMES,
    build={ArrayRef: _set_array, _Dtype: _set_dtype, OrderedDict: set_attributes},
)


def _regions(path: str, state: Any) -> Iterator[Region]:
    for name, leaf in leaves(path, state, TensorRef | ArrayRef):
        array = leaf.array if isinstance(leaf, TensorRef) else leaf
        spans = [part for part in array.parts if isinstance(part, Span)]
        if spans == [array.span]:
            yield Region(name, array.dtype, array.shape, spans[0].offset, spans[0].nbytes)
        else:
            for at, span in enumerate(spans):
                elements = span.nbytes // int(array.dtype[2:])
                yield Region(f"{name}@@.{at}", array.dtype, (elements,), span.offset, span.nbytes)


def _describe(leaf: object) -> str:
    match leaf:
        case Known():
            return leaf.name
        case Span():
            return f"{leaf.nbytes} bytes that are no array's"
        case _:
            return "an array or a type that is not complete"
