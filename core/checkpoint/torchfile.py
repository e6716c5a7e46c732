"""Torch's checkpoint files, without torch: written from a skeleton and the bytes of storages, read into placeholders.

What is written is what ``torch.save`` writes, and is read by ``torch.load(weights_only=True)``, mapped or not. What is
read may have been written by anybody. See torchstate for the two ends that need torch.
"""

from __future__ import annotations

import math
import os
import sys
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elastic_adapter.core.checkpoint.archive import ALIGNMENT, ArchiveReader, ArchiveWriter, Record
from elastic_adapter.core.checkpoint.files import Buffer, Damaged, Refused, Region, Skeleton, Written, flat, open_plain
from elastic_adapter.core.checkpoint.hashing import digest, hasher
from elastic_adapter.core.checkpoint.pickles import PLAIN_NAMES, Constant, Grammar, Known, Machine, set_attributes
from elastic_adapter.core.checkpoint.sources import Blob, Span, TextSource, plain
from elastic_adapter.core.checkpoint.transfer import Output, Writable
from elastic_adapter.core.checkpoint.trees import leaves
from elastic_adapter.core.checkpoint.trees import replace as replace_leaves

_STORAGES = {
    "torch.DoubleStorage": "float64",
    "torch.FloatStorage": "float32",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16",
    "torch.LongStorage": "int64",
    "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16",
    "torch.CharStorage": "int8",
    "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
    "torch.ComplexDoubleStorage": "complex128",
    "torch.ComplexFloatStorage": "complex64",
    # Of no type of its own: the tensor has it.
    "torch.storage.UntypedStorage": "uint8",
}
_ITEM_SIZES = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16", "bits16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "bits8", "bits1x8", "bits2x4", "bits4x2"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    "float4_e2m1fn_x2": 1,
    "complex128": 16,
}
# What torch can have.
_MOST_DIMENSIONS = 64
# An expanded tensor has more elements than its storage, a shared layer has a tensor of the same storage under each of
# its names, and torch saves and loads both. But whoever trains with them may copy them all, an optimizer does so: of a
# file of a kilobyte they may be as large as any mask, of a larger one a hundred times its size.
_UNFOLDED = 256 << 20
_MOST_VIEWS = 100
# Names of devices and of storages are shorter; they are compared each time that they are used.
_LONGEST_PLACE = 200


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage, by its key. Its dtype is uint8 if it has none of its own."""

    key: str
    dtype: str
    nbytes: int
    location: str


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor that was not built. Offset and stride count elements."""

    storage: StorageRef
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool = False
    parameter: bool = False
    conj: bool = False
    neg: bool = False

    @property
    def begin(self) -> int:
        """Its first byte in the storage."""
        return self.offset * _ITEM_SIZES[self.dtype]

    @property
    def nbytes(self) -> int:
        """From its first byte in the storage to its last one; more than its elements where there are gaps."""
        return _extent(self.shape, self.stride) * _ITEM_SIZES[self.dtype]

    @property
    def fills_storage(self) -> bool:
        """Whether the storage holds this tensor's elements in their order, and nothing else."""
        return self.begin == 0 and self.unfolded == self.storage.nbytes and _packed(self.shape, self.stride)

    @property
    def unfolded(self) -> int:
        """The bytes of a copy of it: more than its own where elements lie on each other, as in an expanded tensor."""
        return math.prod(self.shape) * _ITEM_SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class TorchFile:
    """A file that was looked at: its state, with placeholders, and where the storages are."""

    path: str
    state: Any
    storages: Mapping[str, Record]

    def regions(self) -> tuple[Region, ...]:
        return tuple(
            _region(name, ref, self.storages[ref.storage.key].offset)
            for name, ref in leaves(self.path, self.state, TensorRef)
        )


def write_torch(
    file: Writable,
    skeleton: Skeleton,
    payloads: Sequence[Buffer],
    *,
    algorithm: str = "xxh3_128",
    crc32: bool = True,
    folder: str = "archive",
) -> Written:
    """Writes the state whose skeleton is given, the bytes of its storages taken from the payloads.

    Without crc32, zip tools call the records corrupt. torch.load does not look at these checksums, and torch.save can
    be told to leave them out as well.
    """
    parsed = parse_torch("the state", skeleton.text, len(skeleton.text) + skeleton.nbytes)
    views = [flat(payload) for payload in payloads]
    sizes = [storage.nbytes for storage in parsed.storages.values()]
    if not sizes == [hole.nbytes for hole in skeleton.holes] == [len(view) for view in views]:
        raise ValueError("the skeleton and its payloads do not agree")
    output = Output(file, algorithm)
    archive = ArchiveWriter(output, folder, crc32=crc32)
    archive.add("data.pkl", skeleton.text)
    archive.add(".format_version", b"1")
    archive.add(".storage_alignment", str(ALIGNMENT).encode())
    archive.add("byteorder", sys.byteorder.encode())
    stored: dict[str, tuple[int, str, memoryview]] = {}
    for key, view in zip(parsed.storages, views, strict=True):
        hash = hasher(algorithm)
        offset = archive.add(f"data/{key}", view, hash)
        stored[key] = offset, hash.hexdigest(), view
    archive.add("version", b"3\n")
    # Forty digits that tell one content from another; torch only logs them.
    archive.add(".data/serialization_id", f"{int(output.hexdigest(), 16) % 10**40:040}".encode())
    archive.finish()

    def region(name: str, ref: TensorRef) -> Region:
        offset, hash, view = stored[ref.storage.key]
        if (ref.begin, ref.nbytes) != (0, len(view)):
            hash = digest(algorithm, view[ref.begin : ref.begin + ref.nbytes])
        return _region(name, ref, offset, hash)

    regions = tuple(region(name, ref) for name, ref in leaves(parsed.path, parsed.state, TensorRef))
    return Written(output.position, algorithm, output.hexdigest(), regions)


def read_torch(path: str) -> TorchFile:
    """Reads the directory and the pickle, and no tensor. Raises Damaged or Refused."""
    fd = open_plain(path)
    try:
        archive = ArchiveReader(path, fd)
        if "byteorder" in archive.records and archive.read("byteorder") != sys.byteorder.encode():
            raise Damaged(path, "its numbers are in the byte order of another kind of machine")
        parsed = parse_torch(path, archive.read("data.pkl"), os.fstat(fd).st_size)
    finally:
        os.close(fd)
    storages = {}
    for key, storage in parsed.storages.items():
        record = archive.records.get(f"data/{key}")
        # A storage may end in the middle of an element.
        if record is None or record.nbytes < storage.nbytes:
            raise Damaged(path, f"its record data/{key} is missing or too short")
        storages[key] = record
    return TorchFile(path, parsed.state, storages)


@dataclass(slots=True)
class Parsed:
    """A state with placeholders, and its storages in the order in which they appear."""

    path: str
    state: Any = None
    storages: dict[str, StorageRef] = field(default_factory=dict)

    def persistent(self, id: object) -> StorageRef:
        match id:
            case ("storage", Known(name=name), str(key), str(location), int(numel)) if (
                name in _STORAGES and numel >= 0 and len(key) + len(location) <= _LONGEST_PLACE
            ):
                dtype = _STORAGES[name]
                storage = StorageRef(key, dtype, numel * _ITEM_SIZES[dtype], location)
                if self.storages.setdefault(key, storage) != storage:
                    raise Damaged(self.path, f"its storage {key} is described in two ways")
                return storage
            case _:
                raise Refused(self.path, "an object from outside of the file that is no storage")


def parse_torch(path: str, text: bytes, size: int) -> Parsed:
    """Reads the pickle of a file of a size, or of a skeleton that is to become one. Raises Damaged or Refused."""
    parsed = Parsed(path)
    grammar = Grammar(NAMES, {OrderedDict: set_attributes}, parsed.persistent)
    parsed.state = Machine(TextSource(path, text), grammar).run()
    unfolded = 0
    for name, leaf in leaves(path, parsed.state, TensorRef | StorageRef | Known):
        if not isinstance(leaf, TensorRef):
            raise Refused(path, f"{leaf.name if isinstance(leaf, Known) else 'a storage'} as a value, at {name}")
        unfolded += leaf.unfolded
    if unfolded > _UNFOLDED + _MOST_VIEWS * size:
        raise Refused(path, "more bytes of tensors than its size explains")
    parsed.state = replace_leaves(path, parsed.state, Blob | Span, lambda _, leaf: plain(leaf))
    return parsed


def _tensor_v2(storage: object, *layout: object) -> TensorRef:
    """Called with offset, shape, stride, whether it needs a gradient, hooks, and sometimes metadata."""
    if not isinstance(storage, StorageRef):
        raise TypeError("a tensor has no storage")
    return _tensor(storage, storage.dtype, layout)


def _tensor_v3(storage: object, *layout: object) -> TensorRef:
    """The same with a type of its own, before the metadata."""
    *before, dtype = layout[:6]
    if not isinstance(storage, StorageRef) or not isinstance(dtype, Constant):
        raise TypeError("a tensor has no storage or no type")
    return _tensor(storage, dtype.name.removeprefix("torch."), (*before, *layout[6:]))


def _tensor(storage: StorageRef, dtype: str, layout: tuple[object, ...]) -> TensorRef:
    """A tensor that lies within its storage."""
    offset, shape, stride, requires_grad, _, *metadata = layout
    bits = metadata[0] if metadata else {}
    if not isinstance(bits, dict) or not bits.keys() <= {"conj", "neg"}:
        raise TypeError("a tensor has unknown metadata")
    (start,), sizes, steps = _counts((offset,)), _counts(shape), _counts(stride)
    if len(sizes) != len(steps) or (start + _extent(sizes, steps)) * _ITEM_SIZES[dtype] > storage.nbytes:
        raise ValueError("a tensor lies outside of its storage")
    flags = bool(bits.get("conj")), bool(bits.get("neg"))
    return TensorRef(storage, dtype, start, sizes, steps, bool(requires_grad), False, *flags)


def _counts(values: object) -> tuple[int, ...]:
    if not isinstance(values, tuple) or len(values) > _MOST_DIMENSIONS:
        raise TypeError("a tensor has no shape, or more dimensions than torch knows")
    if not all(type(value) is int and 0 <= value < 1 << 63 for value in values):
        raise TypeError("a tensor's shape is not made of numbers")
    if math.prod(values) >= 1 << 63:
        raise ValueError("a tensor's shape is too large")
    return values


def _parameter(data: object, requires_grad: object, *_: object) -> TensorRef:
    """A parameter. Hooks, and attributes that the program gave it, are not kept."""
    if not isinstance(data, TensorRef):
        raise TypeError("a parameter has no tensor")
    return replace(data, parameter=True, requires_grad=bool(requires_grad))


def _from_type(function: object, type: object, arguments: object, _: object) -> TensorRef:
    """A tensor with attributes that the program gave it; these are not kept."""
    if type not in (_TENSOR, _PARAMETER):
        raise TypeError("a tensor is of an unknown class")
    return _called(function, arguments)


def _called(function: object, arguments: object) -> TensorRef:
    if not isinstance(function, Known) or function.call is None or not isinstance(arguments, tuple):
        raise TypeError("a tensor is made by no function")
    if function.call is _from_type:
        # Nobody counts what is within the arguments of arguments.
        raise TypeError("a tensor is made by a function by a function")
    made = function.call(*arguments)
    if not isinstance(made, TensorRef):
        raise TypeError("a tensor is made by a function that makes none")
    return made


def _counter(counts: object) -> Counter[Any]:
    if type(counts) is not dict:
        raise TypeError("a counter is made from a dict")
    return Counter(counts)


def _device(kind: object, index: object = None) -> Constant:
    if type(kind) is not str or len(kind) > _LONGEST_PLACE or type(index) not in (int, type(None)):
        raise TypeError("no such device")
    return Constant("torch.device", (kind,) if index is None else (kind, index))


_TENSOR, _PARAMETER = Known("torch.Tensor"), Known("torch.nn.parameter.Parameter")
# Whatever a pickle may import: a part of what torch.load(weights_only=True) allows.
NAMES: Mapping[str, Known | Constant] = {
    **PLAIN_NAMES,
    **{
        known.name: known
        for known in (
            _TENSOR,
            _PARAMETER,
            Known("collections.Counter", _counter),
            Known("torch.Size", lambda sizes: _counts(tuple(sizes))),
            Known("torch.device", _device),
            Known("torch._utils._rebuild_tensor_v2", _tensor_v2),
            Known("torch._utils._rebuild_tensor_v3", _tensor_v3),
            Known("torch._utils._rebuild_parameter", _parameter),
            Known("torch._utils._rebuild_parameter_with_state", _parameter),
            Known("torch._tensor._rebuild_from_type_v2", _from_type),
            *map(Known, _STORAGES),
        )
    },
    **{f"torch.{dtype}": Constant(f"torch.{dtype}") for dtype in _ITEM_SIZES},
}


def _extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """How many elements of the storage lie between the first and the last one of a tensor, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _packed(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements follow each other without gaps, the last dimension first."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def _region(name: str, ref: TensorRef, offset: int, hash: str | None = None) -> Region:
    return Region(name, ref.dtype, ref.shape, offset + ref.begin, ref.nbytes, hash)
