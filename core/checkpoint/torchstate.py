"""Between torch's tensors and torch's files: the two ends of torchfile that run where torch is imported.

torch is an argument everywhere, because nothing in the core imports it.

Of a storage, only the part that the state's tensors use is kept: from the first byte that one of them uses to the last.
``torch.save`` keeps all of it, so that a slice of a large buffer brings the whole buffer along. Bytes between two
tensors, or between the rows of one, are kept: leaving them out would take a copy in the worker, or untie tensors that
share memory.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from elastic_adapter.core.checkpoint.files import Damaged, Expected, Hole, Misfit, Refused, Skeleton, memory
from elastic_adapter.core.checkpoint.pickles import Constant, check_import, made_from
from elastic_adapter.core.checkpoint.torchfile import NAMES, TensorRef, TorchFile, read_torch
from elastic_adapter.core.checkpoint.transfer import Target, read_into
from elastic_adapter.core.checkpoint.trees import leaves, replace
from elastic_adapter.core.errors import in_one_line

# Every part begins at a multiple of the largest element's size, so that offsets stay whole numbers of elements.
_CUT = 16
# Most of what is pickled, and no storage.
_PLAIN = frozenset((str, int, float, bool, tuple, dict, list, OrderedDict, FunctionType, type, type(None)))


def skeleton(torch: Any, state: object) -> tuple[Skeleton, list[Any]]:
    """The skeleton of a file of this state, and what belongs into its holes: one-dimensional uint8 tensors.

    These are the memory of the state itself, on whatever device it is: nothing is copied here. Refused, if the state
    holds what torch.load(weights_only=True) would not load, or what can't be pickled; what is not seen here,
    write_torch refuses.
    """
    return made_from(state, lambda each: _skeleton(torch, each))


def _skeleton(torch: Any, state: object) -> tuple[Skeleton, list[Any]]:
    parts = _Parts(torch)
    text = parts.pickled(state)
    if parts.cut():
        # Where the parts begin is known only now.
        text = parts.pickled(state)
    sources = [part.bytes(torch) for part in parts.by_storage.values()]
    return Skeleton(text, tuple(Hole(len(text), source.numel()) for source in sources)), sources


@dataclass(slots=True, eq=False)
class _Part:
    """The part of one storage that goes into the file. The storage is kept alive: its address is its identity."""

    storage: Any
    type: Any
    item_size: int
    key: str
    # Where it is, in torch's words.
    location: str
    begin: int
    end: int
    # What tensors use of it, as far as they have been seen.
    used_begin: int | None = None
    used_end: int = 0

    def use(self, begin: int, end: int) -> None:
        begin = begin // _CUT * _CUT
        self.used_begin = begin if self.used_begin is None else min(begin, self.used_begin)
        self.used_end = max(end, self.used_end)

    def bytes(self, torch: Any) -> Any:
        found = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return found.set_(self.storage, self.begin, (self.end - self.begin,), (1,))


class _Parts:
    """The parts of all storages of a state, in the order in which they appear."""

    def __init__(self, torch: Any) -> None:
        self.by_storage: dict[int, _Part] = {}
        self._torch = torch
        self._rebuilds = torch._utils._rebuild_tensor_v2, torch._utils._rebuild_tensor_v3  # noqa: SLF001
        # The kinds of storages of plain tensors, and where these are, by the types of tensors, as they are met.
        self._kinds: dict[Any, tuple[Any, str]] = {}

    def pickled(self, state: object) -> bytes:
        """The pickle that torch makes of the state, in terms of the parts as they are known by now."""
        parts = self

        class Pickler(pickle.Pickler):
            def reducer_override(self, value: Any) -> Any:
                return parts.reduced(value)

            def persistent_id(self, value: Any) -> Any:
                # Asked of every single number: most of the time that a long list of them takes.
                return None if type(value) in _PLAIN else parts.id(value)

        written = io.BytesIO()
        Pickler(written, protocol=2).dump(state)
        return written.getvalue()

    def cut(self) -> bool:
        """Reduces the parts to what is used of them; whether that changed anything. Refused, where it is not there."""
        changed = False
        for part in self.by_storage.values():
            assert part.used_begin is not None
            if part.used_end > part.end:
                raise Refused("the state", "memory that its storage does not have: was it freed?")
            changed |= (part.begin, part.end) != (part.used_begin, part.used_end)
            part.begin, part.end = part.used_begin, part.used_end
        return changed

    def reduced(self, value: Any) -> Any:
        """What torch makes of a tensor, with a part in the place of the storage; nothing for what is no tensor."""
        if not isinstance(value, self._torch.Tensor):
            if value is bytes:
                # Pickle asks for the class where bytes are empty.
                raise Refused("the state", "b'' (torch.load with weights_only=True does not take it)")
            check_import(value, NAMES)
            return NotImplemented
        return self._reduced(value)

    def _reduced(self, tensor: Any) -> Any:
        if self._is_plain(tensor) and (known := self._kinds.get(tensor.dtype)) is not None:
            # What follows, in a third of the time: a state may have many small ones.
            part = self._part_of(tensor.untyped_storage(), tensor.element_size(), *known)
            hooks: OrderedDict[Any, Any] = OrderedDict()
            others = [tuple(tensor.shape), tensor.stride(), tensor.requires_grad, hooks]
            return self._rebuilds[0], self._placed(tensor, part, tensor.storage_offset(), others)
        function, arguments, *rest = tensor.__reduce_ex__(2)
        if function in self._rebuilds:
            storage, offset, *others = arguments
            part = self._part(storage)
            if function is self._rebuilds[0] and self._is_plain(tensor):
                self._kinds[tensor.dtype] = part.type, part.location
            arguments = self._placed(tensor, part, offset, others)
        return function, arguments, *rest

    def _is_plain(self, tensor: Any) -> bool:
        """Whether torch takes it as its type says, as long as that type has one kind of storage."""
        return (
            type(tensor) is self._torch.Tensor
            and tensor.layout is self._torch.strided
            and tensor.device.type == "cpu"
            and not (tensor.is_nested or tensor.is_conj() or tensor.is_neg())
            and not tensor.__dict__
            and tensor._backward_hooks is None  # noqa: SLF001
        )

    def _placed(self, tensor: Any, part: _Part, offset: int, others: Iterable[Any]) -> Any:
        size = tensor.element_size()
        part.use(offset * size, (offset + _extent(tensor)) * size)
        return part, offset - part.begin // size, *others

    def id(self, value: Any) -> Any:
        """What stands for a storage in the pickle, as torch.save has it."""
        if type(value) is not _Part:
            if not (isinstance(value, self._torch.storage.TypedStorage) or self._torch.is_storage(value)):
                return None
            # Of a tensor with attributes, or of another class.
            value = self._part(value)
            value.use(value.begin, value.end)
        return "storage", value.type, value.key, value.location, (value.end - value.begin) // value.item_size

    def _part(self, storage: Any) -> _Part:
        if isinstance(storage, self._torch.storage.TypedStorage):
            untyped, item_size = storage._untyped_storage, storage.dtype.itemsize  # noqa: SLF001
            kind = getattr(self._torch, storage._pickle_storage_type())  # noqa: SLF001
        else:
            untyped, item_size, kind = storage, 1, self._torch.UntypedStorage
        return self._part_of(untyped, item_size, kind, self._torch.serialization.location_tag(untyped))

    def _part_of(self, untyped: Any, item_size: int, kind: Any, location: str) -> _Part:
        part = self.by_storage.get(untyped._cdata)  # noqa: SLF001
        if part is None:
            end = untyped.nbytes() // item_size * item_size
            part = _Part(untyped, kind, item_size, str(len(self.by_storage)), location, 0, end)
            self.by_storage[untyped._cdata] = part  # noqa: SLF001
        if part.type is not kind:
            raise Refused("the state", f"the same memory as {part.type.__name__} and as {kind.__name__}")
        return part


def _extent(tensor: Any) -> int:
    """How many elements of the storage lie between the first and the last one of a tensor, both included."""
    numel = int(tensor.numel())
    if numel == 0 or tensor.is_contiguous():
        return numel
    return 1 + sum((int(size) - 1) * int(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def load_torch(
    torch: Any, path: str, *, into: Mapping[str, Any] | None = None, expected: Expected | None = None
) -> Any:
    """The state of a file. Tensors that ``into`` names are filled in place, and are part of the state.

    All others are new, on the CPU, and tied as they were. With something expected, the whole file is checked on the
    way; when Damaged is raised then, the tensors of ``into`` hold anything: fill them from another file before they are
    used.
    """
    return _Loading(torch, read_torch(path), into or {}).run(expected)


class _Loading:
    def __init__(self, torch: Any, file: TorchFile, into: Mapping[str, Any]) -> None:
        self._torch = torch
        self._file = file
        self._into = into
        # The memory that each storage is read into, and the byte of it that the storage begins at.
        self._homes: dict[str, tuple[Any, int]] = {}
        self._sizes: dict[str, int] = {}
        self._built: dict[int, Any] = {}
        self._is_checked = False

    def run(self, expected: Expected | None) -> Any:
        refs = list(leaves(self._file.path, self._file.state, TensorRef))
        mixed = _mixed(ref for _, ref in refs)
        names = Counter(name for name, _ in refs)
        # A name that two tensors have does not say which one is meant.
        self._into = {name: each for name, each in self._into.items() if names[name] == 1}
        for name, ref in refs:
            tensor = self._into.get(name)
            if tensor is not None:
                if tuple(tensor.shape) != ref.shape:
                    raise Misfit(self._file.path, name, ref.shape, tuple(tensor.shape))
                if ref.storage.key not in self._homes and ref.storage.key not in mixed and self._fits(tensor, ref):
                    start = tensor.storage_offset() * tensor.element_size()
                    self._homes[ref.storage.key] = tensor.untyped_storage(), start
        for _, ref in refs:
            self._sizes[ref.storage.key] = ref.storage.nbytes
            if ref.storage.key not in self._homes:
                self._homes[ref.storage.key] = self._torch.UntypedStorage(ref.storage.nbytes), 0
        read_into(self._file.path, [self._target(key) for key in self._homes], expected)
        self._is_checked = expected is not None
        with self._torch.no_grad():
            return replace(self._file.path, self._file.state, TensorRef | Constant, self._value)

    def _fits(self, tensor: Any, ref: TensorRef) -> bool:
        """Whether the bytes of the storage are those of the tensor, and can be put there directly."""
        torch = self._torch
        return (
            ref.fills_storage
            and not (ref.conj or ref.neg)
            and type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and tensor.layout == torch.strided
            and tensor.device.type == "cpu"
            and tensor.dtype == getattr(torch, ref.dtype, None)
            and tensor.is_contiguous()
            and not (tensor.is_conj() or tensor.is_neg())
        )

    def _target(self, key: str) -> Target:
        record, (storage, start), size = self._file.storages[key], self._homes[key], self._sizes[key]
        whole = record.crc32 if size == record.nbytes else None
        return Target(record.offset, memory(storage.data_ptr() + start, size), whole)

    def _value(self, name: str, value: TensorRef | Constant) -> Any:
        if isinstance(value, Constant):
            return self._made(lambda: self._constant(value))
        return self._placed(name, value) if name in self._into else self._tensor(value)

    def _placed(self, name: str, ref: TensorRef) -> Any:
        tensor = self._into[name]
        storage, start = self._homes[ref.storage.key]
        if not (self._fits(tensor, ref) and tensor.data_ptr() == storage.data_ptr() + start):
            tensor.copy_(self._tensor(ref))
        return tensor

    def _tensor(self, ref: TensorRef) -> Any:
        if id(ref) not in self._built:
            self._built[id(ref)] = self._made(lambda: self._build(ref))
        return self._built[id(ref)]

    def _made(self, make: Callable[[], Any]) -> Any:
        """What torch refuses to make is the file's fault, unless its bytes are known to be right."""
        try:
            return make()
        except (RuntimeError, TypeError, AttributeError) as error:
            if self._is_checked:
                raise Refused(self._file.path, f"what this torch does not make ({in_one_line(error)})") from error
            raise Damaged(self._file.path, f"torch does not make what it holds ({error})") from error

    def _constant(self, constant: Constant) -> Any:
        found = getattr(self._torch, constant.name.removeprefix("torch."))
        return found(*constant.arguments) if constant.arguments else found

    def _build(self, ref: TensorRef) -> Any:
        storage, start = self._homes[ref.storage.key]
        # Wherever the program has its tensors made by default.
        tensor = self._torch.empty(0, dtype=getattr(self._torch, ref.dtype), device="cpu")
        tensor.set_(storage, start // tensor.element_size() + ref.offset, ref.shape, ref.stride)
        if ref.conj:
            tensor = tensor.conj()
        if ref.neg:
            tensor = self._torch._neg_view(tensor)  # noqa: SLF001
        if ref.parameter:
            return self._torch.nn.Parameter(tensor, requires_grad=ref.requires_grad)
        return tensor.requires_grad_(ref.requires_grad)


def _mixed(refs: Iterable[TensorRef]) -> set[str]:
    """Storages that hold tensors of several types: these can't lie at any other offset than their own."""
    types: dict[str, str] = {}
    return {ref.storage.key for ref in refs if types.setdefault(ref.storage.key, ref.dtype) != ref.dtype}
