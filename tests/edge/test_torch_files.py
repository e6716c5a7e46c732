"""Files of torch: what we write, torch reads as its own; what torch writes, we read."""

import copy
import io
import os
import pickle
import random
import subprocess
import sys
import threading
import tracemalloc
import zipfile
from collections import Counter, OrderedDict

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from elastic_adapter.core.checkpoint.files import Damaged, Expected, Misfit, Refused, Region, Skeleton
from elastic_adapter.core.checkpoint.hashing import digest, verify_file, verify_sample
from elastic_adapter.core.checkpoint.torchfile import TensorRef, read_torch, write_torch
from elastic_adapter.core.checkpoint.torchstate import load_torch, skeleton
from elastic_adapter.core.checkpoint.trees import DEEPEST

torch = pytest.importorskip("torch")

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
]


def write(path, state, **options):
    made, sources = skeleton(torch, state)
    payloads = [memoryview(source.cpu().numpy()) for source in sources]
    with open(path, "wb") as file:
        return write_torch(file, made, payloads, **options)


def saved(path, state):
    torch.save(state, path)
    return path


def random_bytes(dtype, *shape):
    generator = torch.Generator().manual_seed(len(shape))
    size = torch.empty(0, dtype=dtype).element_size()
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (*shape, size), dtype=torch.uint8, generator=generator)
    return raw.reshape(-1).view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)


# States


def trained():
    """A small model after a step of training, with the states of its optimizer and scheduler."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    scheduler.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "epoch": 3,
        "rng": torch.get_rng_state(),
        "python": random.getstate(),
    }


def views():
    base = torch.arange(100.0)
    matrix = base[:60].view(6, 10)
    return {
        "base": base,
        "rows": matrix[1:3],
        "columns": matrix[:, 2:4],
        "transposed": matrix.t(),
        "every second": base[::2],
        "expanded": base[7:8].expand(4, 3),
        "none of it": base[50:50],
    }


def tied():
    shared = torch.nn.Parameter(torch.randn(4, 4))
    twin = torch.nn.Linear(4, 4)
    twin.weight = shared
    both = torch.nn.ModuleList([twin, torch.nn.Linear(4, 4)])
    both[1].weight = shared
    return {"state": both.state_dict(), "parameters": list(both.parameters()), "again": shared, "data": shared.data}


def attributes():
    marked = torch.ones(3)
    marked.note = "mine"
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.expert = True
    return [marked, parameter, torch.nn.Buffer(torch.ones(4))]


def others():
    return {
        "constants": [torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1), torch.Size([2, 3])],
        "bytes": [b"abc", bytearray(b"xyz"), b"\xff" * 1000],
        "numbers": [1, -1, 1 << 40, 1 << 200, 0.5, float("inf"), True, None, 1 + 2j],
        "text": ["", "ü", "\n", "x" * 1000],
        "sets": {1, "a"},
        "counter": Counter("aab"),
        "ordered": OrderedDict([("b", 1), ("a", OrderedDict())]),
        "tuple": ((), (1,), (1, 2, 3, 4), [[]], {}),
        1: {2.5: None, ("a", 1): "tuple"},
    }


def flags():
    complexes = torch.randn(3, dtype=torch.complex64)
    negative = torch.randn(3, dtype=torch.complex64).conj().imag
    return [complexes.conj(), complexes, negative, torch.randn(2, requires_grad=True)]


STATES = {
    "a trained model": trained,
    "types": lambda: {str(dtype): random_bytes(dtype, 3, 5) for dtype in DTYPES},
    "scalars": lambda: {str(dtype): random_bytes(dtype) for dtype in DTYPES},
    "empty": lambda: [torch.empty(0), torch.empty(3, 0, 2, dtype=torch.int8), torch.empty(0, dtype=torch.float8_e5m2)],
    "views": views,
    "tied": tied,
    "attributes": attributes,
    "others": others,
    "flags": flags,
    "odd ones after plain ones of the same types": lambda: [
        *(random_bytes(dtype, 2) for dtype in DTYPES),
        *(flags(), attributes(), views(), tied()),
    ],
    "one tensor": lambda: torch.arange(7),
    "one number": lambda: 5,
    "nothing": dict,
    "many": lambda: {f"layer.{at}.weight": torch.full((at % 7, 3), at) for at in range(400)},
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
}


def assert_same(left, right):
    """Equal in every respect, down to the bits, the layout and what is tied to what."""
    _assert_same(left, right, [], [])


def _assert_same(left, right, lefts, rights):
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape, left.stride()) == (right.dtype, right.shape, right.stride())
        assert (left.requires_grad, left.is_conj(), left.is_neg()) == (
            right.requires_grad,
            right.is_conj(),
            right.is_neg(),
        )
        assert left.device == right.device
        assert bits(left) == bits(right)
        lefts.append(left)
        rights.append(right)
        ties = [
            [a is b or a.untyped_storage()._cdata == b.untyped_storage()._cdata for a in s]
            for s, b in ((lefts, left), (rights, right))
        ]
        assert ties[0] == ties[1]
    elif isinstance(left, dict):
        assert list(left) == list(right)
        assert getattr(left, "_metadata", None) == getattr(right, "_metadata", None)
        for key in left:
            _assert_same(left[key], right[key], lefts, rights)
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            _assert_same(a, b, lefts, rights)
    else:
        assert left == right


def bits(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


@pytest.mark.parametrize("name", STATES)
def test_torch_reads_ours_as_its_own(tmp_path, name):
    """Loaded by torch, plain or mapped, our file gives what torch's own gives."""
    state = STATES[name]()
    write(tmp_path / "ours.pt", state)
    saved(tmp_path / "torch.pt", state)
    for mapped in (False, True):
        options = {"map_location": "cpu", "weights_only": True, "mmap": mapped}
        assert_same(torch.load(tmp_path / "ours.pt", **options), torch.load(tmp_path / "torch.pt", **options))


def test_attributes_of_tensors_are_written(tmp_path):
    """As torch writes them, also where plain tensors of the same type come first."""
    write(tmp_path / "a.pt", [torch.ones(3), *attributes()])
    plain, marked, parameter, _ = torch.load(tmp_path / "a.pt", weights_only=True)
    assert [vars(plain), vars(marked), vars(parameter)] == [{}, {"note": "mine"}, {"expert": True}]


@pytest.mark.parametrize("writer", ["ours", "torch"])
@pytest.mark.parametrize("name", STATES)
def test_we_read_what_torch_reads(tmp_path, name, writer):
    """Whoever wrote the file, we build from it what torch builds, but for attributes of a tensor."""
    state = STATES[name]()
    path = str(tmp_path / "a.pt")
    (write if writer == "ours" else lambda path, state: torch.save(state, path))(path, state)
    found, expected = load_torch(torch, path), torch.load(path, weights_only=True)
    if name == "others":
        assert found["constants"][4] == expected["constants"].pop() == tuple(found["constants"].pop())
    assert_same(found, expected)


@pytest.mark.parametrize("name", ["a trained model", "types", "tied", "many", "others"])
def test_our_file_is_torchs_byte_for_byte(tmp_path, name):
    """All but the forty digits by which torch tells files apart, and their checksum."""
    state = STATES[name]()
    write(tmp_path / "a.pt", state, folder="a")
    ours = (tmp_path / "a.pt").read_bytes()
    saved(tmp_path / "a.pt", state)
    theirs = (tmp_path / "a.pt").read_bytes()
    assert len(ours) == len(theirs)
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        start = archive.getinfo("a/.data/serialization_id").header_offset
    different = [at for at in range(len(ours)) if ours[at] != theirs[at]]
    assert different[0] > start
    assert len(different) <= 48


TENSORS = [
    lambda: torch.arange(6.0),
    lambda: torch.arange(24, dtype=torch.int16).view(2, 3, 4),
    lambda: torch.ones(3, dtype=torch.bfloat16),
    lambda: torch.tensor(5),
    lambda: torch.empty(0, 2),
    lambda: torch.nn.Parameter(torch.randn(2, 2)),
    lambda: torch.randn(100)[30:40],
    lambda: torch.arange(64).view(8, 8)[2:4, 1:3].T,
    lambda: torch.randint(0, 9, (50,), dtype=torch.uint32)[7:9],
]


@st.composite
def nested_states(draw):
    """Nested containers with tensors, some of which are there several times, and views of them."""
    pool = [make() for make in draw(st.lists(st.sampled_from(TENSORS), min_size=1, max_size=5))]
    pool += [tensor[1:] for tensor in pool if tensor.dim() and len(tensor) > 1]
    leaf = st.sampled_from(pool) | st.integers() | st.text() | st.none() | st.floats(allow_nan=False) | st.booleans()
    keys = st.text() | st.integers()
    inner = st.recursive(
        leaf, lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner), max_leaves=20
    )
    return draw(inner)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(nested_states())
def test_any_nested_state_survives(tmp_path, state):
    """Written by us and read by torch and by us, it is what torch makes of it."""
    path = str(tmp_path / "a.pt")
    expected = torch.load(saved(path, state), weights_only=True)
    written = write(path, state)
    assert_same(torch.load(path, weights_only=True), expected)
    assert_same(load_torch(torch, path, expected=Expected(written.size, written.hash)), expected)


# What is kept of a storage


def test_only_what_is_used_is_kept(tmp_path):
    """A slice of a large buffer takes its own bytes, several slices of it what lies between them."""
    buffer = torch.arange(1_000_000.0)
    state = {"a": buffer[500_001:500_011], "b": buffer[500_101:500_103], "small": torch.arange(3.0)[1:]}
    write(tmp_path / "a.pt", state)
    assert (tmp_path / "a.pt").stat().st_size < 5_000
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert all(torch.equal(found[key], state[key]) for key in state)
    found["a"][-1] = 7
    assert found["a"].untyped_storage().nbytes() == (102 + 1) * 4
    assert found["a"].untyped_storage()._cdata == found["b"].untyped_storage()._cdata


def test_a_storage_that_ends_within_an_element_is_read(tmp_path):
    """Bytes that are seen as numbers need not be a whole number of them. torch does not read its own file of them."""
    numbers = torch.arange(11, dtype=torch.uint8)[:8].view(torch.int32)
    assert load_torch(torch, str(saved(tmp_path / "torch.pt", numbers))).tolist() == numbers.tolist()
    write(tmp_path / "ours.pt", numbers)
    assert load_torch(torch, str(tmp_path / "ours.pt")).tolist() == numbers.tolist()
    assert torch.load(tmp_path / "ours.pt", weights_only=True).tolist() == numbers.tolist()


def test_memory_of_two_types_is_refused():
    """As torch.save does."""
    numbers = torch.arange(4.0)
    with pytest.raises(Refused, match="the same memory as FloatStorage and as IntStorage"):
        skeleton(torch, [numbers, numbers.view(torch.int32)])


def test_nothing_is_copied_in_the_worker():
    """What belongs into the holes is the state's own memory."""
    weight = torch.zeros(10)
    _, (source,) = skeleton(torch, {"w": weight[4:]})
    weight[5] = 1
    assert source.view(torch.float32).tolist() == [0, 1, 0, 0, 0, 0]
    assert source.data_ptr() == weight.data_ptr() + 16


# What the writer tells


def test_regions_say_where_tensors_are(tmp_path):
    """Name, type, shape, place and checksum of each, those that are tied or views as well."""
    path, state = tmp_path / "a.pt", {"views": views(), "tied": tied(), "plain": [torch.arange(5), 3]}
    written = write(path, state, algorithm="sha256")
    data = path.read_bytes()
    assert (written.size, written.hash) == (len(data), digest("sha256", data))
    assert all(digest("sha256", data[r.offset :][: r.nbytes]) == r.hash for r in written.regions)
    regions = {region.name: region for region in written.regions}
    assert regions["plain/0"].dtype == "int64"
    assert data[regions["plain/0"].offset :][:40] == torch.arange(5).numpy().tobytes()
    assert regions["views/columns"].shape == (6, 2)
    assert regions["views/columns"].offset == regions["views/base"].offset + 8
    assert regions["views/columns"].nbytes == (5 * 10 + 2) * 4
    assert regions["tied/again"].offset == regions["tied/data"].offset == regions["tied/state/0.weight"].offset
    unhashed = tuple(Region(r.name, r.dtype, r.shape, r.offset, r.nbytes) for r in written.regions)
    assert read_torch(str(path)).regions() == unhashed
    verify_file(str(path), Expected(written.size, written.hash, "sha256"))
    verify_sample(str(path), Expected(written.size, written.hash, "sha256"), written.regions, share=1.0, seed=0)


def test_torch_computes_our_offsets(tmp_path, monkeypatch):
    """torch can be told to compute where storages lie instead of looking it up; ours lie there."""
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")
    path = tmp_path / "a.pt"
    for name in ("a trained model", "many", "empty", "views"):
        write(path, STATES[name]())
        torch.load(path, weights_only=True)
        with torch.utils.serialization.config.patch("load.calculate_storage_offsets", True):
            torch.load(path, weights_only=True, mmap=True)
        torch.load(path, map_location="meta", weights_only=True)


@pytest.mark.parametrize("crc32", [True, False])
def test_zip_tools_accept_our_files(tmp_path, crc32):
    """If the checksums of zip files are wanted; torch does not look at them."""
    state = trained()
    write(tmp_path / "a.pt", state, crc32=crc32)
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert (archive.testzip() is None) == crc32
    torch.load(tmp_path / "a.pt", weights_only=True)
    load_torch(torch, str(tmp_path / "a.pt"))


def test_torchs_files_without_checksums_are_read(tmp_path):
    """Whoever told torch to leave them out can restore from its files."""
    torch.serialization.set_crc32_options(False)
    try:
        saved(tmp_path / "a.pt", trained())
    finally:
        torch.serialization.set_crc32_options(True)
    load_torch(torch, str(tmp_path / "a.pt"))


SAVER = """
import sys
from elastic_adapter.core.checkpoint.files import Skeleton
from elastic_adapter.core.checkpoint.torchfile import write_torch
packed, memory, path = sys.argv[1:]
skeleton = Skeleton.unpack(open(packed, "rb").read())
data, at, payloads = memoryview(open(memory, "rb").read()), 0, []
for hole in skeleton.holes:
    payloads.append(data[at : at + hole.nbytes])
    at += hole.nbytes
with open(path, "wb", buffering=0) as file:
    print(write_torch(file, skeleton, payloads).hash)
assert not {"torch", "numpy", "paddle", "zipfile"} & set(sys.modules), "the saver imports too much"
"""


def test_a_process_without_torch_writes_the_file(tmp_path):
    """From a skeleton and bytes, with nothing but the standard library and xxhash."""
    state = trained()
    made, sources = skeleton(torch, state)
    (tmp_path / "packed").write_bytes(made.pack())
    (tmp_path / "memory").write_bytes(torch.cat(sources).numpy().tobytes())
    arguments = [tmp_path / "packed", tmp_path / "memory", tmp_path / "a.pt"]
    command = [sys.executable, "-W", "ignore", "-c", SAVER, *arguments]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=50).stdout
    data = (tmp_path / "a.pt").read_bytes()
    assert said.strip() == digest("xxh3_128", data)
    saved(tmp_path / "torch.pt", state)
    assert_same(torch.load(tmp_path / "a.pt", weights_only=True), torch.load(tmp_path / "torch.pt", weights_only=True))


def test_payloads_have_to_fit(tmp_path):
    """A skeleton with the bytes of another state is our own mistake, and said at once."""
    made, _ = skeleton(torch, [torch.ones(3), torch.ones(4)])
    for payloads in ([b"x" * 12], [b"x" * 12, b"x" * 15], [b"x" * 12, b"x" * 16, b""]):
        with pytest.raises(ValueError, match="the skeleton and its payloads do not agree"):
            write_torch(io.BytesIO(), made, payloads)


# Into tensors that are there


def model_with(value):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.BatchNorm1d(200), torch.nn.Linear(200, 10))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(value)
    return model


def test_parameters_are_filled_in_place(tmp_path):
    """They keep their memory, and are what the state holds; the rest is new."""
    path = str(tmp_path / "a.pt")
    torch.manual_seed(5)
    source = model_with(0)
    for parameter in source.parameters():
        torch.nn.init.normal_(parameter)
    written = write(path, {"model": source.state_dict(), "other": torch.arange(3), "step": 7})
    target = model_with(9)
    into = {f"model/{name}": tensor for name, tensor in target.state_dict().items()}
    before = {name: tensor.data_ptr() for name, tensor in into.items()}
    state = load_torch(torch, path, into=into, expected=Expected(written.size, written.hash))
    assert_same(target.state_dict(), source.state_dict())
    assert {f"model/{name}": tensor.data_ptr() for name, tensor in target.state_dict().items()} == before
    assert all(state["model"][name.removeprefix("model/")] is tensor for name, tensor in into.items())
    assert (state["other"].tolist(), state["step"]) == ([0, 1, 2], 7)
    assert all(parameter.requires_grad for parameter in target.parameters())


def test_what_does_not_lie_alike_is_copied(tmp_path):
    """Another type, gaps, a view in the file, a parameter that needs a gradient."""
    path = str(tmp_path / "a.pt")
    base = torch.arange(12.0)
    write(path, {"a": base.view(3, 4), "b": base[4:8], "c": torch.arange(6.0).view(2, 3), "d": torch.ones(2).bool()})
    into = {
        "a": torch.nn.Parameter(torch.zeros(3, 4, dtype=torch.bfloat16)),
        "b": torch.zeros(8)[::2],
        "c": torch.zeros(3, 2).t(),
        "d": torch.zeros(2, dtype=torch.int64),
    }
    load_torch(torch, path, into=into)
    assert into["a"].tolist() == base.view(3, 4).tolist()
    assert into["b"].tolist() == [4, 5, 6, 7]
    assert into["c"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert into["d"].tolist() == [1, 1]


def test_tied_parameters_are_filled_once_or_each(tmp_path):
    """Whether they are tied in the file, in the model, in both or in none."""
    path = str(tmp_path / "a.pt")
    weight = torch.arange(4.0)
    home = torch.zeros(4)
    for state in ({"a": weight, "b": weight}, {"a": weight, "b": weight.clone()}):
        write(path, state)
        for a, b in ((home, home), (home, home.view(4)), (torch.zeros(4), torch.zeros(4))):
            a.zero_()
            load_torch(torch, path, into={"a": a, "b": b})
            assert a.tolist() == b.tolist() == [0, 1, 2, 3]
        lone = torch.zeros(4)
        found = load_torch(torch, path, into={"b": lone})
        assert found["a"].tolist() == lone.tolist() == [0, 1, 2, 3]


def test_another_shape_is_named(tmp_path):
    """Before anything is read."""
    path = str(tmp_path / "a.pt")
    write(path, {"fc": {"weight": torch.ones(3, 4)}})
    target = torch.zeros(3, 5)
    with pytest.raises(Misfit, match=r"fc/weight has the shape \[3, 4\] there, \[3, 5\] here"):
        load_torch(torch, path, into={"fc/weight": target})
    assert not target.any()


# What is refused


class Evil:
    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


class Objecting:
    def __reduce__(self):
        raise ValueError("not me,\nand not today")


def test_a_state_that_could_not_be_loaded_is_refused_when_it_is_saved():
    """With the place of what is wrong with it."""
    import numpy as np

    for value, wanted in (
        (np.float64(1.0), "numpy._core.multiarray.scalar"),
        (b"", "b'' (torch.load with weights_only=True does not take it)"),
        (frozenset([1]), "builtins.frozenset"),
        (range(3), "builtins.range"),
        (Evil(os.system, "id"), "posix.system"),
        (torch.ones(2).to_sparse(), "torch._utils._rebuild_sparse_tensor"),
        (torch.ones(2, device="meta"), "torch._utils._rebuild_meta_tensor_no_storage"),
        (torch.nn.Linear, "torch.nn.modules.linear.Linear"),
        (threading.Lock(), "what can't be pickled (TypeError: cannot pickle '_thread.lock' object)"),
        (Objecting(), "what can't be pickled (ValueError: not me, and not today)"),
    ):
        with pytest.raises(Refused, match=r"^the state at extra/1 was refused: it asks for") as caught:
            skeleton(torch, {"model": torch.ones(3), "extra": [1, value]})
        assert caught.value.wanted.startswith(wanted)


@pytest.mark.parametrize("left", [0, 8, 4 * 999])
def test_memory_that_was_freed_is_refused(left):
    """And it is not made anew: nobody knows what it held."""
    freed = torch.randn(1000)
    freed.untyped_storage().resize_(left)
    with pytest.raises(Refused, match=r"^the state at extra/b was refused: .* memory that its storage does not have"):
        skeleton(torch, {"model": torch.ones(3), "extra": {"a": torch.ones(1), "b": freed}})
    assert freed.untyped_storage().nbytes() == left


def test_what_the_worker_does_not_see_the_saver_refuses():
    """A storage by itself, or a constant that is no type, would not be loaded."""
    for value in (torch.ones(2).untyped_storage(), ..., torch.qint8):
        made, sources = skeleton(torch, {"x": value})
        with pytest.raises(Refused, match=r"^the state was refused"):
            write_torch(io.BytesIO(), made, [memoryview(source.numpy()) for source in sources])


def nested(levels):
    found = []
    for _ in range(levels):
        found = [found]
    return found


@pytest.mark.parametrize("levels", [DEEPEST - 1, 1000, 100_000])
def test_a_state_that_is_nested_too_deeply(levels):
    """It is refused where it begins, by whoever saves: nobody would read it."""
    with pytest.raises(Refused, match=rf"^the state( at extra(/0)+)? was refused: it asks for more than {DEEPEST} "):
        skeleton(torch, {"model": torch.ones(3), "extra": nested(levels)})
    skeleton(torch, {"model": torch.ones(3), "extra": nested(DEEPEST - 2)})


def test_what_is_refused_in_a_list_that_holds_itself():
    """It is found, and the search ends."""
    found = [threading.Lock()]
    found.insert(0, found)
    with pytest.raises(Refused, match=r"^the state at extra/0(/0)+ was refused: it asks for what can't be pickled"):
        skeleton(torch, {"extra": found})


DANGEROUS = [
    *(os.system, eval, exec, getattr, __import__, open, subprocess.Popen, pickle.loads),
    *(torch.load, torch.save, torch.hub.load, torch.jit.load, torch.compile),
]


@pytest.mark.parametrize("function", DANGEROUS, ids=lambda function: getattr(function, "__name__", "function"))
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_file_that_calls_is_refused_by_name(tmp_path, function, protocol):
    """And what it calls is named; nothing is run."""
    path = str(tmp_path / "evil.pt")
    called = tmp_path / "called"
    state = {"w": torch.ones(2), "x": Evil(function, f"touch {called}")}
    try:
        torch.save(state, path, pickle_protocol=protocol)
    except (pickle.PicklingError, TypeError, AttributeError):
        pytest.skip("not even pickle takes it")
    for read in (read_torch, lambda path: load_torch(torch, path)):
        with pytest.raises(Refused, match=r"evil\.pt was refused: it asks for") as caught:
            read(path)
        assert caught.value.wanted.endswith(function.__name__)
    assert not called.exists()


def archive_of(path, text, **records):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", text)
        archive.writestr("archive/byteorder", records.pop("byteorder", "little"))
        for key, data in records.items():
            archive.writestr(f"archive/data/{key[1:]}", data)


def storage(key=b"0", kind=b"ctorch\nFloatStorage\n", numel=4):
    return b"(X\x07\0\0\0storage" + kind + b"X\x01\0\0\0" + key + b"X\x03\0\0\0cpuK" + bytes([numel]) + b"tQ"


def tensor(body, offset=b"K\0", shape=b"K\x04\x85", stride=b"K\x01\x85", rest=b"\x89}"):
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + body + offset + shape + stride + rest + b"tR."


ODD = {
    "another kind of persistent id": (
        b"\x80\x02(X\x06\0\0\0modulectorch\nFloatStorage\nX\x01\0\0\0" + b"0NK\x04tQ.",
        Refused,
    ),
    "a persistent id that is a text": (b"\x80\x02X\x07\0\0\0storageQ.", Refused),
    "a storage of no known type": (tensor(storage(kind=b"ctorch\nFooStorage\n")), Refused),
    "a storage of a type that is none": (tensor(storage(kind=b"ccollections\nOrderedDict\n")), (Damaged, Refused)),
    "a storage that is not there": (tensor(storage(b"7")), Damaged),
    "a storage that is too large": (tensor(storage(numel=5)), Damaged),
    "a tensor outside of its storage": (tensor(storage(), offset=b"K\x01"), Damaged),
    "a tensor of another storage's size": (tensor(storage(), shape=b"J\xff\xff\xff\x7f\x85"), Damaged),
    "a negative offset": (tensor(storage(), offset=b"J\xff\xff\xff\xff"), Damaged),
    "a negative stride": (tensor(storage(), stride=b"J\xff\xff\xff\xff\x85"), Damaged),
    "a shape of texts": (tensor(storage(), shape=b"X\x01\0\0\0a\x85"), Damaged),
    "a stride too few": (tensor(storage(), stride=b")"), Damaged),
    "a tensor of a number": (tensor(b"K\x01"), Damaged),
    "arguments that are missing": (tensor(storage(), rest=b""), Damaged),
    "a storage as a value": (b"\x80\x02" + storage() + b".", Refused),
    "a function as a value": (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n.", Refused),
    "a class as a value": (b"\x80\x02ctorch\nFloatStorage\n.", Refused),
    "a class of tensors": (b"\x80\x02ctorch\nTensor\n)\x81.", Refused),
    "a tensor by another function": (
        b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(ccollections\nOrderedDict\nctorch\nTensor\n)}tR.",
        Damaged,
    ),
    "a tensor of the user's class": (
        b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(ccollections\nOrderedDict\nccollections\nOrderedDict\n)}tR.",
        Damaged,
    ),
    "a tensor by a function by a function": (
        b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\nq\0(h\0ctorch\nTensor\nq\1"
        + b"(h\0h\1" * 3000
        + b")"
        + b"Nt" * 3001
        + b"R.",
        Damaged,
    ),
    "an expanded tensor of two gigabytes": (
        tensor(storage(), shape=b"J\x00\x00\x00\x20\x85", stride=b"K\0\x85"),
        Refused,
    ),
    "an expanded tensor of four megabytes, a hundred times": (
        b"\x80\x02("
        + tensor(storage(), shape=b"J\x00\x00\x10\x00\x85", stride=b"K\0\x85")[2:-1]
        + b"q\x07"
        + b"h\x07" * 100
        + b"t.",
        Refused,
    ),
    "more dimensions than torch has": (
        tensor(storage(), shape=b"(" + b"K\x01" * 65 + b"t", stride=b"(" + b"K\x01" * 65 + b"t"),
        Damaged,
    ),
    "more elements than there are numbers": (
        tensor(storage(), shape=b"J\xff\xff\xff\x7fq\x01h\x01h\x01\x87", stride=b"K\0K\0K\0\x87"),
        Damaged,
    ),
    "whole numbers with a gradient": (tensor(storage(kind=b"ctorch\nIntStorage\n"), rest=b"\x88}"), Damaged),
    "a device that is none": (b"\x80\x02ctorch\ndevice\nX\x03\0\0\0foo\x85R.", Damaged),
    "a device of a number": (b"\x80\x02ctorch\ndevice\nK\x01\x85R.", Damaged),
    "a counter of deep tuples": (
        b"\x80\x02ccollections\nCounter\n](N" + b"\x85" * 2_000_000 + b"K\x01\x86e\x85R.",
        Damaged,
    ),
    "a counter of letters": (b"\x80\x02ccollections\nCounter\nX\x02\0\0\0ab\x85R.", Damaged),
    "a change of a tensor": (tensor(storage())[:-1] + b"}b.", Refused),
    "a quantized tensor": (b"\x80\x02ctorch._utils\n_rebuild_qtensor\n.", Refused),
    "a tensor from numpy": (b"\x80\x02ctorch._utils\n_rebuild_device_tensor_from_numpy\n.", Refused),
    "a wrapper": (b"\x80\x02ctorch._utils\n_rebuild_wrapper_subclass\n.", Refused),
}


@pytest.mark.parametrize("what", ODD)
def test_files_that_no_torch_wrote(tmp_path, what):
    """Each is refused or damaged, and torch never sees it."""
    text, error = ODD[what]
    path = tmp_path / "odd.pt"
    archive_of(path, text, _0=bytes(16))
    with pytest.raises(error, match=r"odd\.pt"):
        load_torch(torch, str(path))


def test_the_file_that_is_odd_in_no_way(tmp_path):
    """What the ones above are made of is a tensor otherwise."""
    archive_of(tmp_path / "a.pt", tensor(storage()), _0=bytes(16))
    assert load_torch(torch, str(tmp_path / "a.pt")).tolist() == [0, 0, 0, 0]
    assert isinstance(read_torch(str(tmp_path / "a.pt")).state, TensorRef)


@pytest.mark.parametrize("writer", ["ours", "torch"])
def test_tensors_may_be_larger_than_their_file(tmp_path, writer):
    """As large as a mask for each head is, or as often there as layers share their weights."""
    mask = torch.ones(1024, 1024, dtype=torch.bool).expand(8, 16, 1024, 1024)
    weight = torch.randn(1000, 1000)
    path = str(tmp_path / "a.pt")
    for state in ({"mask": mask}, {f"layers.{at}.weight": weight.view(1000, 1000) for at in range(96)}):
        (write if writer == "ours" else lambda path, state: torch.save(state, path))(path, state)
        found = load_torch(torch, path)
        assert {name: each.stride() for name, each in found.items()} == {n: each.stride() for n, each in state.items()}


def test_a_long_list_of_numbers_costs_little_to_save():
    """No more than its text: it may be there at each save."""
    state = {"order": list(range(1_000_000)), "w": torch.ones(3)}
    tracemalloc.start()
    made, _ = skeleton(torch, state)
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used < 8 * len(made.text)


def test_one_storage_of_two_kinds_is_damage(tmp_path):
    """A key stands for one storage."""
    two = b"\x80\x02(" + tensor(storage())[2:-1] + tensor(storage(kind=b"ctorch\nIntStorage\n"))[2:-1] + b"t."
    archive_of(tmp_path / "a.pt", two, _0=bytes(16))
    with pytest.raises(Damaged, match="its storage 0 is described in two ways"):
        read_torch(str(tmp_path / "a.pt"))


def test_numbers_of_another_machine_are_refused(tmp_path):
    """Nobody turns them around here."""
    archive_of(tmp_path / "a.pt", tensor(storage()), _0=bytes(16), byteorder="big")
    with pytest.raises(Damaged, match="byte order of another kind of machine"):
        read_torch(str(tmp_path / "a.pt"))


def test_torchs_older_files_are_named_as_such(tmp_path):
    """Those from before the zip format."""
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(
        Damaged,
        match=r"a\.pt is damaged: it is a plain pickle, or in torch.s format before 1\.6: load it with torch\.load",
    ):
        read_torch(str(tmp_path / "a.pt"))


# What a disk could do


@pytest.fixture
def small(tmp_path):
    """A small file of ours, and what is known of it."""
    path = str(tmp_path / "a.pt")
    state = {"model": OrderedDict(a=torch.arange(40.0), b=torch.ones(3, dtype=torch.bfloat16)), "step": 3}
    written = write(path, state)
    return path, Expected(written.size, written.hash)


def test_a_flipped_bit_is_found_wherever_it_is(small):
    """With what was noted, each one is; without, a read gives a state or says that the file is damaged, no more."""
    path, expected = small
    with open(path, "rb") as file:
        data = bytearray(file.read())
    random_bit = random.Random(0)
    outcomes = Counter()
    for at in range(len(data)):
        bit = 1 << random_bit.randrange(8)
        data[at] ^= bit
        with open(path, "wb") as file:
            file.write(data)
        data[at] ^= bit
        with pytest.raises(Damaged):
            verify_file(path, expected, stored=False)
        with pytest.raises((Damaged, Refused)):
            load_torch(torch, path, expected=expected)
        try:
            load_torch(torch, path)
            outcomes["read"] += 1
        except (Damaged, Refused) as error:
            outcomes[type(error).__name__] += 1
    assert outcomes["Damaged"] > outcomes["read"] > 0


def test_a_flipped_bit_of_data_is_found_without_a_manifest(tmp_path):
    """A file of somebody else's has the checksums of its zip records."""
    path = saved(tmp_path / "a.pt", {"a": torch.arange(1000.0)})
    data = bytearray(path.read_bytes())
    data[data.index(torch.arange(1000.0).numpy().tobytes()) + 1234] ^= 1
    path.write_bytes(data)
    torch.load(path, weights_only=True)
    with pytest.raises(Damaged, match="the checksum of its bytes from"):
        load_torch(torch, str(path))


def test_a_cut_is_found_wherever_it_is(small):
    """The file ends anywhere, or goes on."""
    path, expected = small
    with open(path, "rb") as file:
        data = file.read()
    for size in [*range(0, len(data), 7), len(data) - 1]:
        with open(path, "wb") as file:
            file.write(data[:size])
        for check in (None, expected):
            with pytest.raises(Damaged):
                load_torch(torch, path, expected=check)


def test_a_state_is_not_changed_by_being_saved(tmp_path):
    """Nor are its tensors."""
    state = trained()
    before = copy.deepcopy(state)
    write(tmp_path / "a.pt", state)
    assert_same(state, before)


def test_a_skeleton_is_the_same_each_time():
    """Nothing in it depends on where things are in memory."""
    assert skeleton(torch, trained())[0] == skeleton(torch, trained())[0]
    assert isinstance(skeleton(torch, [])[0], Skeleton)
