"""Between paddle's tensors and paddle's files: the two ends of paddlefile that run where paddle is imported.

paddle is an argument everywhere, because nothing in the core imports it.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import secrets
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from elastic_adapter.core.checkpoint.files import Damaged, Expected, Hole, Misfit, Refused, Skeleton, memory
from elastic_adapter.core.checkpoint.paddlefile import (
    NAME_TABLE,
    NAMES,
    ArrayRef,
    PaddleFile,
    TensorRef,
    read_paddle,
)
from elastic_adapter.core.checkpoint.pickles import check_import, made_from
from elastic_adapter.core.checkpoint.sources import Span
from elastic_adapter.core.checkpoint.transfer import Target, read_into
from elastic_adapter.core.checkpoint.trees import leaves, replace
from elastic_adapter.core.errors import in_one_line

# How paddle's types are stored: what numpy lacks goes as whole numbers of the same size. paddle.load makes bfloat16 of
# uint16 again, but of float8 it makes int8.
_STORED = {
    "bool": "|b1",
    "uint8": "|u1",
    "int8": "|i1",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "complex64": "<c8",
    "complex128": "<c16",
    "bfloat16": "<u2",
    "float8_e4m3fn": "|i1",
    "float8_e5m2": "|i1",
}
_LOADED = {stored: dtype for dtype, stored in _STORED.items() if not dtype.startswith("float8")}
# What paddle can have.
_MOST_DIMENSIONS = 9
_ARRAYS = {*_STORED.values(), "<u4", "<u8"}


def skeleton(paddle: Any, state: object) -> tuple[Skeleton, list[Any]]:
    """The skeleton of a file of this state, and what belongs into its holes: tensors and numpy arrays without gaps.

    These are the memory of the state itself, on whatever device it is, except where there were gaps. Refused, if the
    state holds what read_paddle would not read, or what can't be pickled; what is not seen here, write_paddle refuses.
    """
    return made_from(state, lambda each: _Pieces(paddle).skeleton(each))


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """A tensor or an array, to be pickled as an array without its bytes."""

    code: str
    shape: tuple[int, ...]
    mark: _Mark


@dataclass(frozen=True, slots=True, eq=False)
class _Mark:
    """Stands for the bytes of a piece."""

    index: int


class _Pieces:
    """The pieces of one state, in the order in which they appear."""

    def __init__(self, paddle: Any) -> None:
        import numpy as np

        self._paddle = paddle
        self._np = np
        self._array, self._array_arguments, *_ = cast("tuple[Any, ...]", np.empty(0).__reduce__())
        self._sources: list[Any] = []
        self._by_value: dict[int, tuple[Any, _Piece]] = {}
        # What marks a hole in the pickle: no other bytes in it are the same.
        self._token = secrets.token_bytes(16)

    def skeleton(self, state: object) -> tuple[Skeleton, list[Any]]:
        pickled = self._pickled(state)
        # Each mark was pickled as a persistent id. Bytes of any length take its place, with its number in the memo.
        marks = re.compile(b"C\\x14" + re.escape(self._token) + b"(....)(q.|r....)Q", re.DOTALL)
        # An instruction of protocol 4 is used for them.
        text, at = bytearray(pickle.PROTO + b"\x04"), 2
        holes: list[Hole] = []
        for mark in marks.finditer(pickled):
            nbytes = nbytes_of(self._sources[int.from_bytes(mark[1], "little")])
            text += pickled[at : mark.start()] + pickle.BINBYTES8 + struct.pack("<Q", nbytes)
            holes.append(Hole(len(text), nbytes))
            text += mark[2]
            at = mark.end()
        text += pickled[at:]
        assert len(holes) == len(self._sources)
        return Skeleton(bytes(text), tuple(holes)), self._sources

    def reduced(self, value: Any) -> Any:
        """How paddle.save pickles a value, but for the bytes of arrays."""
        if isinstance(value, _Piece):
            content = 1, value.shape, self._np.dtype(value.code), False, value.mark
            return self._array, self._array_arguments, content
        if isinstance(value, self._paddle.Tensor):
            return tuple, ((value.name, self._piece(value)),)
        if isinstance(value, self._np.ndarray | self._np.generic) and value.dtype.str not in _ARRAYS:
            raise Refused("the state", f"numpy.dtype({value.dtype.str!r})")
        if type(value) is self._np.ndarray:
            return self.reduced(self._piece(value))
        check_import(value, NAMES)
        return NotImplemented

    def id(self, mark: _Mark) -> bytes:
        return self._token + mark.index.to_bytes(4, "little")

    def _pickled(self, state: object) -> bytes:
        pieces = self

        class Pickler(pickle.Pickler):
            def reducer_override(self, value: Any) -> Any:
                return pieces.reduced(value)

            def persistent_id(self, value: Any) -> Any:
                # Asked of every single number: most of the time that a long list of them takes.
                return pieces.id(value) if type(value) is _Mark else None

        written = io.BytesIO()
        # Not protocol 4: the sizes of its frames would be wrong once the bytes are filled in.
        Pickler(written, protocol=3).dump(self._named(state))
        return written.getvalue()

    def _named(self, state: object) -> object:
        """A plain dict of tensors is saved as arrays, with a table of the tensors' names; anything else as it is."""
        tensor = self._paddle.Tensor
        if not isinstance(state, dict) or not all(_is_plain(tensor, value) for value in state.values()):
            return state
        tensors = {key: value for key, value in state.items() if isinstance(value, tensor)}
        arrays = {key: self._piece(value) for key, value in tensors.items()}
        return {**state, **arrays, NAME_TABLE: {key: value.name for key, value in tensors.items()}}

    def _piece(self, value: Any) -> _Piece:
        """The same one for the same value; values are kept, so that none has the id of another."""
        if id(value) not in self._by_value:
            mark = _Mark(len(self._sources))
            if isinstance(value, self._np.ndarray):
                self._sources.append(self._np.ascontiguousarray(value))
                piece = _Piece(value.dtype.str, value.shape, mark)
            else:
                code = _STORED.get(str(value.dtype).removeprefix("paddle."))
                if code is None or not value.is_dense():
                    raise Refused("the state", f"a tensor that paddle can't save ({value.dtype})")
                self._sources.append(value if value.is_contiguous() else value.contiguous())
                piece = _Piece(code, tuple(value.shape), mark)
            self._by_value[id(value)] = value, piece
        return self._by_value[id(value)][1]


def _is_plain(tensor: type, value: object) -> bool:
    """Whether paddle.save accepts the value in a plain dict of tensors: a tensor, or a dict without any."""
    if not isinstance(value, dict):
        return isinstance(value, tensor)
    return next(leaves("the state", value, tensor), None) is None


def nbytes_of(source: Any) -> int:
    item_size = source.itemsize if hasattr(source, "ctypes") else source.element_size()
    return int(math.prod(source.shape) * item_size)


def load_paddle(
    paddle: Any, path: str, *, into: Mapping[str, Any] | None = None, expected: Expected | None = None
) -> Any:
    """The state of a file, as paddle.load gives it. Tensors that ``into`` names are filled in place, and part of it.

    All others are new. With something expected, the whole file is checked on the way; when Damaged is raised then, the
    tensors of ``into`` hold anything: fill them from another file before they are used.
    """
    return _Loading(paddle, read_paddle(path), into or {}).run(expected)


class _Loading:
    def __init__(self, paddle: Any, file: PaddleFile, into: Mapping[str, Any]) -> None:
        import numpy as np

        self._paddle = paddle
        self._np = np
        self._file = file
        self._into = into
        self._on_cpu = paddle.empty([1]).place.is_cpu_place()
        # What each array is read into: a tensor, or an array of numpy where a tensor can't be filled like that.
        self._homes: dict[int, Any] = {}
        # Tensors that somebody has: another one of the same content has to be a copy.
        self._given = {id(tensor) for tensor in into.values()}

    def run(self, expected: Expected | None) -> Any:
        targets: list[Target] = []
        found = list(leaves(self._file.path, self._file.state, TensorRef | ArrayRef))
        names = Counter(name for name, _ in found)
        # A name that two arrays have does not say which one is meant.
        self._into = {name: each for name, each in self._into.items() if names[name] == 1}
        # First the ones that can be filled in place: the same array may be there under another name.
        for name, leaf in sorted(found, key=lambda item: item[0] not in self._into):
            array = _array(leaf)
            tensor = self._into.get(name)
            if tensor is not None and tuple(tensor.shape) != array.shape:
                raise Misfit(self._file.path, name, array.shape, tuple(tensor.shape))
            if isinstance(leaf, TensorRef) and len(array.shape) > _MOST_DIMENSIONS:
                raise Damaged(self._file.path, f"{name} has {len(array.shape)} dimensions, more than paddle knows")
            if id(array) not in self._homes:
                home = tensor if tensor is not None and self._fits(tensor, array) else self._new(name, leaf, array)
                self._homes[id(array)] = home
                targets.extend(_targets(array, home))
        read_into(self._file.path, targets, expected)
        with self._paddle.no_grad():
            return replace(self._file.path, self._file.state, TensorRef | ArrayRef, self._value)

    def _fits(self, tensor: Any, array: ArrayRef) -> bool:
        """Whether the bytes of the array are those of the tensor, and can be put there directly."""
        return bool(
            not array.fortran
            and tensor.is_dense()
            and tensor.place.is_cpu_place()
            and _STORED.get(dtype_of(tensor)) == array.dtype
            and tensor.is_contiguous()
        )

    def _new(self, name: str, leaf: object, array: ArrayRef) -> Any:
        if isinstance(leaf, TensorRef) and self._on_cpu and array.dtype in _LOADED and not array.fortran:
            return self._paddle.empty(list(array.shape), dtype=_LOADED[array.dtype])
        try:
            return self._np.empty(array.shape, dtype=array.dtype, order="F" if array.fortran else "C")
        except ValueError as error:
            # Also without any element, an array can be too large.
            raise Damaged(self._file.path, f"numpy does not make an array of {name} ({in_one_line(error)})") from error

    def _value(self, name: str, leaf: TensorRef | ArrayRef) -> Any:
        try:
            return self._made(name, leaf, self._homes[id(_array(leaf))])
        except (ValueError, TypeError) as error:
            words = f"paddle does not make what {name} is ({in_one_line(error)})"
            raise Damaged(self._file.path, words) from error

    def _made(self, name: str, leaf: Any, home: Any) -> Any:
        if name in self._into:
            tensor = self._into[name]
            if tensor is not home:
                tensor.set_value(self._tensor(home, like=dtype_of(tensor)))
            return tensor
        if isinstance(leaf, ArrayRef):
            return home if isinstance(home, self._np.ndarray) else home.numpy()
        made = self._tensor(home, like=None)
        if leaf.name:
            made.name = leaf.name
        return made

    def _tensor(self, home: Any, like: str | None) -> Any:
        """A tensor of its own of what was read, of another type if one is named."""
        if isinstance(home, self._np.ndarray):
            made = self._paddle.to_tensor(home)
        elif id(home) in self._given:
            made = home.clone()
        else:
            self._given.add(id(home))
            made = home
        return made if like is None else converted(made, like)


def converted(tensor: Any, dtype: str) -> Any:
    """As a tensor of another type, where it is of another one."""
    if dtype_of(tensor) == dtype:
        return tensor
    # float8 is stored as whole numbers, the bytes of which it is.
    return tensor.view(dtype) if dtype.startswith("float8") and dtype_of(tensor) == "int8" else tensor.astype(dtype)


def _array(leaf: TensorRef | ArrayRef) -> ArrayRef:
    return leaf.array if isinstance(leaf, TensorRef) else leaf


def _targets(array: ArrayRef, home: Any) -> Iterator[Target]:
    address = home.ctypes.data if hasattr(home, "ctypes") else home.data_ptr()
    view = memory(address, array.nbytes)
    at = 0
    for part in array.parts:
        if isinstance(part, Span):
            yield Target(part.offset, view[at : at + part.nbytes])
            at += part.nbytes
        else:
            view[at : at + len(part)] = part
            at += len(part)


def dtype_of(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("paddle.")
