"""Files of paddle: what we write, paddle reads as its own; what paddle writes, we read."""

import io
import os
import pickle
import random
import subprocess
import sys
import threading
import tracemalloc
import warnings
from collections import Counter, OrderedDict

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from elastic_adapter.core.checkpoint.files import Damaged, Expected, Misfit, Refused, Region
from elastic_adapter.core.checkpoint.hashing import digest, verify_file, verify_sample
from elastic_adapter.core.checkpoint.paddlefile import ArrayRef, TensorRef, read_paddle, write_paddle
from elastic_adapter.core.checkpoint.paddlestate import load_paddle, skeleton
from elastic_adapter.core.checkpoint.sources import LONG
from elastic_adapter.core.checkpoint.trees import DEEPEST
from helpers.frameworks import imported

np = pytest.importorskip("numpy")
paddle = imported("paddle")

DTYPES = [
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"),
    *("complex64", "complex128"),
]
FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]


def payloads_of(sources):
    return [array_of(source).data for source in sources]


def raw(value):
    array = value if isinstance(value, np.ndarray) else np.array(value.cpu())
    return np.ascontiguousarray(array).tobytes()


def array_of(value):
    """The bytes of a source as a numpy array, of any type and shape: a buffer that is not of bytes."""
    return value if isinstance(value, np.ndarray) else np.ascontiguousarray(np.array(value.cpu()))


def write(path, state, **options):
    made, sources = skeleton(paddle, state)
    with open(path, "wb") as file:
        return write_paddle(file, made, payloads_of(sources), **options)


def saved(path, state, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        paddle.save(state, str(path), **options)
    return str(path)


def random_bytes(dtype, *shape):
    """A tensor with any bits, not-a-number among them."""
    tensor = paddle.empty(list(shape), dtype=dtype)
    source = random.Random(len(shape))
    values = [source.choice([0, 1, 2, 100]) for _ in range(int(np.prod(shape)))]
    plain = paddle.to_tensor(np.array(values, dtype="float32").reshape(shape))
    return plain.astype(dtype) if values else tensor


def trained():
    paddle.seed(1)
    model = paddle.nn.Sequential(paddle.nn.Linear(6, 5), paddle.nn.BatchNorm1D(5), paddle.nn.Linear(5, 2))
    scheduler = paddle.optimizer.lr.NoamDecay(d_model=10, warmup_steps=10)
    optimizer = paddle.optimizer.AdamW(learning_rate=scheduler, parameters=model.parameters(), multi_precision=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(paddle.randn([4, 6])).sum().backward()
    optimizer.step()
    scheduler.step()
    return model, optimizer


def layouts():
    base = paddle.arange(24, dtype="float32").reshape([4, 6])
    return {"base": base, "transposed": base.T, "column": base[:, 2], "row": base[1], "block": base[1:3, 2:4]}


def arrays():
    return {
        "tensor": paddle.arange(3),
        "array": np.arange(5),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "strided": np.arange(10)[::3],
        "scalar": np.array(3.5),
        "unsigned": np.arange(3, dtype=np.uint64),
    }


def others():
    return {
        "tensor": paddle.arange(3),
        "numbers": [1, -1, 1 << 40, 1 << 200, 0.5, True, None],
        "text": ["", "ü", "x" * 1000],
        "nested": {"tuple": (1, ("a", 2), []), "ordered": OrderedDict(b=1, a=2)},
        3: {"key": "number"},
    }


def strings_of_bytes():
    """Short ones, and long ones, which are not read with what surrounds them."""
    short, *long = (np.random.default_rng(count).bytes(count) for count in (1, LONG - 1, LONG, LONG + 1))
    return {
        "values": [b"", short, *long, bytearray(), bytearray(short), *map(bytearray, long)],
        "inside": [(short, "x"), (long[1], "x"), {short, 5}],
        "keys": {short: 1, (short, 5): 2, long[1]: 3},
    }


STATES = {
    "a model": lambda: {**trained()[0].state_dict()},
    "an optimizer": lambda: {**trained()[1].state_dict()},
    "both": lambda: {"model": trained()[0].state_dict(), "optimizer": trained()[1].state_dict(), "epoch": 3},
    "types": lambda: {dtype: random_bytes(dtype, 3, 5) for dtype in DTYPES + FLOAT8},
    "scalars": lambda: {dtype: random_bytes(dtype) for dtype in DTYPES},
    "empty tensors": lambda: {dtype: random_bytes(dtype, 0, 3) for dtype in DTYPES},
    "nested types": lambda: [{dtype: random_bytes(dtype, 3, 5)} for dtype in DTYPES],
    "master weights": lambda: {
        "w_moment": paddle.randn([3]),
        "master_weights": {"w": paddle.randn([3]), "b": paddle.randn([2])},
        "LR_Scheduler": {"last_epoch": 3, "last_lr": 0.1},
    },
    "layouts": layouts,
    "nested layouts": lambda: list(layouts().values()),
    "arrays beside tensors": arrays,
    "arrays alone": lambda: {"a": np.arange(3), "b": [np.ones((2, 2), dtype="float32")]},
    "one tensor": lambda: paddle.arange(7),
    "one array": lambda: np.arange(7),
    "one number": lambda: 5,
    "others": others,
    "nothing": dict,
    "large": lambda: {"a": paddle.arange(200_000), "b": paddle.arange(70_000, dtype="float64"), "c": paddle.ones([3])},
    "many": lambda: {f"layer.{at}.weight": paddle.full([at % 7, 3], at) for at in range(400)},
}


def assert_same(left, right):
    assert type(left) is type(right), (left, right)
    if isinstance(left, paddle.Tensor):
        assert (left.dtype, left.shape, left.stop_gradient) == (right.dtype, right.shape, right.stop_gradient)
        assert raw(left) == raw(right)
    elif isinstance(left, np.ndarray):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert left.tobytes() == right.tobytes()
    elif isinstance(left, dict):
        assert list(left) == list(right)
        assert [type(key) for key in left] == [type(key) for key in right]
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    else:
        assert left == right


def names(state):
    if isinstance(state, paddle.Tensor):
        return state.name
    return {key: names(value) for key, value in state.items()} if isinstance(state, dict) else None


@pytest.mark.parametrize("name", STATES)
def test_paddle_reads_ours_as_its_own(tmp_path, name):
    """Loaded by paddle, our file gives what paddle's own gives, the names of the tensors included."""
    state = STATES[name]()
    write(tmp_path / "ours", state)
    ours, theirs = paddle.load(str(tmp_path / "ours")), paddle.load(saved(tmp_path / "paddle", state))
    assert_same(ours, theirs)
    if name in ("a model", "an optimizer", "master weights"):
        assert names(ours) == names(theirs)
    assert_same(
        paddle.load(str(tmp_path / "ours"), return_numpy=True), paddle.load(str(tmp_path / "paddle"), return_numpy=True)
    )


@pytest.mark.parametrize("protocol", ["ours", 2, 3, 4])
@pytest.mark.parametrize("name", STATES)
def test_we_read_what_paddle_reads(tmp_path, name, protocol):
    """Whoever wrote the file, and in whichever protocol, we build from it what paddle builds."""
    state = STATES[name]()
    path = str(tmp_path / "a.pdparams")
    if protocol == "ours":
        write(path, state)
    else:
        saved(path, state, protocol=protocol)
    found, expected = load_paddle(paddle, path), paddle.load(path)
    assert_same(found, expected)
    if name in ("a model", "an optimizer", "master weights"):
        assert names(found) == names(expected)


def test_what_paddle_had_to_cut_is_put_together(tmp_path):
    """Arrays of a gigabyte and more, in protocols that know no such sizes: here, smaller ones, cut as paddle cuts."""
    path = str(tmp_path / "a.pdparams")
    array = np.arange(60.0).reshape(3, 20)
    for protocol in (2, 3, 4):
        with open(path, "wb") as file:
            pickle.dump(
                {
                    "other": np.arange(3),
                    "w@@.0": array.flatten()[:25],
                    "w@@.1": array.flatten()[25:50],
                    "w@@.2": array.flatten()[50:],
                    "UnpackBigParamInfor@@": {"w": {"OriginShape": (3, 20), "slices": ["w@@.0", "w@@.1", "w@@.2"]}},
                    "StructuredToParameterName@@": {"w": "linear_0.w_0", "other": "o"},
                },
                file,
                protocol=protocol,
            )
        found, expected = load_paddle(paddle, path), paddle.load(path)
        assert_same(dict(sorted(found.items())), dict(sorted(expected.items())))
        target = paddle.zeros([3, 20], dtype="float64")
        load_paddle(paddle, path, into={"w": target})
        assert target.tolist() == array.tolist()
        assert [region.name for region in read_paddle(path).regions()] == (
            [] if protocol == 2 else ["other", "w@@.0", "w@@.1", "w@@.2"]
        )


def test_a_tensor_that_is_there_twice_is_written_once(tmp_path):
    """paddle makes two tensors of it."""
    shared = paddle.arange(100_000)
    write(tmp_path / "a", {"a": shared, "b": shared})
    assert (tmp_path / "a").stat().st_size < 900_000
    for found in (paddle.load(str(tmp_path / "a")), load_paddle(paddle, str(tmp_path / "a"))):
        found["a"][0] = 7
        assert (found["a"][:2].tolist(), found["b"][:2].tolist()) == ([7, 1], [0, 1])
    first, second = paddle.zeros([100_000], dtype="int64"), paddle.zeros([100_000], dtype="float32")
    load_paddle(paddle, str(tmp_path / "a"), into={"b": first, "a": second})
    assert (first[5].item(), second[5].item()) == (5, 5.0)


def test_float8_comes_back_where_it_is_wanted(tmp_path):
    """paddle.load gives whole numbers for it; a tensor of that type is filled with its bits."""
    for dtype in FLOAT8:
        value = paddle.to_tensor([0.5, 2.0, -1.0]).astype(dtype)
        write(tmp_path / "a", {"w": value, "v": value})
        assert paddle.load(str(tmp_path / "a"))["w"].dtype == paddle.int8
        into = {"w": paddle.zeros([3]).astype(dtype), "v": paddle.zeros([3]).astype(dtype)}
        load_paddle(paddle, str(tmp_path / "a"), into=into)
        assert into["w"].astype("float32").tolist() == into["v"].astype("float32").tolist() == [0.5, 2.0, -1.0]


TENSORS = [
    lambda: paddle.arange(6, dtype="float32"),
    lambda: paddle.arange(24).astype("int16").reshape([2, 3, 4]),
    lambda: paddle.ones([3], dtype="bfloat16"),
    lambda: paddle.to_tensor(5),
    lambda: paddle.zeros([0, 2]),
    lambda: paddle.create_parameter([2, 2], "float32"),
    lambda: paddle.arange(64).reshape([8, 8])[2:4, 1:3].T,
    lambda: np.arange(5.0),
]


@st.composite
def nested_states(draw):
    pool = [make() for make in draw(st.lists(st.sampled_from(TENSORS), min_size=1, max_size=4))]
    leaf = st.sampled_from(pool) | st.integers() | st.text() | st.none() | st.floats(allow_nan=False) | st.booleans()
    keys = st.text() | st.integers()
    return draw(
        st.recursive(
            leaf,
            lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
            max_leaves=15,
        )
    )


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(nested_states())
def test_any_nested_state_survives(tmp_path, state):
    """Written by us and read by paddle and by us, it is what paddle makes of it."""
    path = str(tmp_path / "a")
    expected = paddle.load(saved(path, state))
    written = write(path, state)
    assert_same(paddle.load(path), expected)
    assert_same(load_paddle(paddle, path, expected=Expected(written.size, written.hash)), expected)


def test_regions_say_where_tensors_are(tmp_path):
    """Name, type, shape, place and checksum of each."""
    path = tmp_path / "a.pdopt"
    state = {
        "model": trained()[0].state_dict(),
        "optimizer": trained()[1].state_dict(),
        "large": paddle.ones([300, 300]),
    }
    written = write(path, state, algorithm="md5")
    data = path.read_bytes()
    assert (written.size, written.hash) == (len(data), digest("md5", data))
    assert all(digest("md5", data[r.offset :][: r.nbytes]) == r.hash for r in written.regions)
    regions = {region.name: region for region in written.regions}
    assert regions["model/0.weight"].shape == (6, 5)
    assert data[regions["model/0.weight"].offset :][:120] == raw(state["model"]["0.weight"])
    assert read_paddle(str(path)).regions() == tuple(
        Region(r.name, r.dtype, r.shape, r.offset, r.nbytes) for r in written.regions
    )
    expected = Expected(written.size, written.hash, "md5")
    verify_file(str(path), expected)
    verify_sample(str(path), expected, written.regions, share=1.0, seed=0)


SAVER = """
import sys
from elastic_adapter.core.checkpoint.files import Skeleton
from elastic_adapter.core.checkpoint.paddlefile import write_paddle
packed, memory, path = sys.argv[1:]
skeleton = Skeleton.unpack(open(packed, "rb").read())
data, at, payloads = memoryview(open(memory, "rb").read()), 0, []
for hole in skeleton.holes:
    payloads.append(data[at : at + hole.nbytes])
    at += hole.nbytes
with open(path, "wb", buffering=0) as file:
    print(write_paddle(file, skeleton, payloads).hash)
assert not {"torch", "numpy", "paddle"} & set(sys.modules), "the saver imports too much"
"""


def test_a_process_without_paddle_writes_the_file(tmp_path):
    """From a skeleton and bytes, with nothing but the standard library and xxhash."""
    state = trained()[0].state_dict()
    made, sources = skeleton(paddle, state)
    (tmp_path / "packed").write_bytes(made.pack())
    (tmp_path / "memory").write_bytes(b"".join(map(raw, sources)))
    arguments = [tmp_path / "packed", tmp_path / "memory", tmp_path / "a.pdparams"]
    command = [sys.executable, "-W", "ignore", "-c", SAVER, *arguments]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=50).stdout
    assert said.strip() == digest("xxh3_128", (tmp_path / "a.pdparams").read_bytes())
    assert_same(paddle.load(str(tmp_path / "a.pdparams")), paddle.load(saved(tmp_path / "paddle", state)))


def test_payloads_have_to_fit():
    """A skeleton with the bytes of another state is our own mistake, and said at once."""
    made, _ = skeleton(paddle, {"a": paddle.ones([3]), "b": paddle.ones([4])})
    for payloads in ([b"x" * 12], [b"x" * 12, b"x" * 15], [b"x" * 12, b"x" * 16, b""]):
        with pytest.raises(ValueError, match="the skeleton and its payloads do not agree"):
            write_paddle(io.BytesIO(), made, payloads)


# Into tensors that are there


def test_parameters_are_filled_in_place(tmp_path):
    """They keep their memory, and are what the state holds; an optimizer takes the rest."""
    path = str(tmp_path / "a.pdparams")
    source, optimizer = trained()
    written = write(path, {"model": source.state_dict(), "optimizer": optimizer.state_dict(), "step": 7})
    target, _ = trained()
    with paddle.no_grad():
        for tensor in target.state_dict().values():
            tensor.set_value(paddle.zeros_like(tensor))
    into = {f"model/{name}": tensor for name, tensor in target.state_dict().items()}
    before = {name: tensor.data_ptr() for name, tensor in into.items()}
    state = load_paddle(paddle, path, into=into, expected=Expected(written.size, written.hash))
    assert_same(
        {name: raw(tensor) for name, tensor in target.state_dict().items()},
        {name: raw(tensor) for name, tensor in source.state_dict().items()},
    )
    assert {f"model/{name}": tensor.data_ptr() for name, tensor in target.state_dict().items()} == before
    assert all(state["model"][name.removeprefix("model/")] is tensor for name, tensor in into.items())
    assert state["step"] == 7
    assert_same(state["optimizer"]["LR_Scheduler"], optimizer.state_dict()["LR_Scheduler"])
    target.set_state_dict(state["model"])


def test_what_does_not_lie_alike_is_copied(tmp_path):
    """Another type, gaps, another order in the file."""
    path = str(tmp_path / "a")
    base = paddle.arange(12, dtype="float32")
    write(
        path, {"a": base.reshape([3, 4]), "b": base[4:8], "c": base[:6].reshape([2, 3]), "d": paddle.ones([2], "bool")}
    )
    gaps = paddle.zeros([3, 2]).T
    into = {"a": paddle.zeros([3, 4], "bfloat16"), "b": paddle.zeros([4], "int64"), "c": gaps, "d": paddle.zeros([2])}
    load_paddle(paddle, path, into=into)
    assert into["a"].astype("float32").tolist() == base.reshape([3, 4]).tolist()
    assert into["b"].tolist() == [4, 5, 6, 7]
    assert gaps.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert into["d"].tolist() == [1, 1]
    with open(path, "wb") as file:
        pickle.dump({"f": np.asfortranarray(np.arange(6.0).reshape(2, 3))}, file, protocol=4)
    target = paddle.zeros([2, 3], "float64")
    load_paddle(paddle, path, into={"f": target})
    assert target.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_another_shape_is_named(tmp_path):
    """Before anything is read."""
    path = str(tmp_path / "a")
    write(path, {"weight": paddle.ones([3, 4])})
    target = paddle.zeros([3, 5])
    with pytest.raises(Misfit, match=r"weight has the shape \[3, 4\] there, \[3, 5\] here"):
        load_paddle(paddle, path, into={"weight": target})
    assert target.sum() == 0


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
    for value, wanted in (
        (range(3), "builtins.range"),
        (Evil(os.system, "id"), "posix.system"),
        (np.array([object()]), "numpy.dtype('|O')"),
        (np.array(["a"]), "numpy.dtype('<U1')"),
        (np.array([1.0], dtype=">f8"), "numpy.dtype('>f8')"),
        (np.datetime64("2020"), "numpy.dtype('<M8[Y]')"),
        (paddle.sparse.sparse_coo_tensor([[0], [0]], [1.0], [2, 2]), "a tensor that paddle can't save"),
        (paddle.nn.Linear, "paddle.nn.layer.common.Linear"),
        (np.arange, "numpy.arange"),
        (threading.Lock(), "what can't be pickled (TypeError: cannot pickle '_thread.lock' object)"),
        (Objecting(), "what can't be pickled (ValueError: not me, and not today)"),
    ):
        with pytest.raises(Refused, match=r"^the state at extra/1 was refused: it asks for") as caught:
            skeleton(paddle, {"model": paddle.ones([3]), "extra": [1, value]})
        assert caught.value.wanted.startswith(wanted)


def nested(levels):
    found = []
    for _ in range(levels):
        found = [found]
    return found


@pytest.mark.parametrize("levels", [DEEPEST - 1, 1000, 100_000])
def test_a_state_that_is_nested_too_deeply(levels):
    """It is refused where it begins, by whoever saves: nobody would read it."""
    with pytest.raises(Refused, match=rf"^the state( at extra(/0)+)? was refused: it asks for more than {DEEPEST} "):
        skeleton(paddle, {"model": paddle.ones([3]), "extra": nested(levels)})
    skeleton(paddle, {"model": paddle.ones([3]), "extra": nested(DEEPEST - 2)})


def test_what_is_refused_in_a_list_that_holds_itself():
    """It is found, and the search ends."""
    found = [threading.Lock()]
    found.insert(0, found)
    with pytest.raises(Refused, match=r"^the state at extra/0(/0)+ was refused: it asks for what can't be pickled"):
        skeleton(paddle, {"extra": found})


DANGEROUS = [
    *(os.system, eval, exec, getattr, __import__, open, subprocess.Popen, pickle.loads),
    *(np.load, np.fromfile, np.memmap, paddle.load, paddle.hub.load, paddle.to_tensor),
]


@pytest.mark.parametrize("function", DANGEROUS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_a_file_that_calls_is_refused_by_name(tmp_path, function, protocol):
    """And what it calls is named; nothing is run."""
    path, called = str(tmp_path / "evil.pdparams"), tmp_path / "called"
    with open(path, "wb") as file:
        pickle.dump({"w": np.arange(3), "x": Evil(function, f"touch {called}")}, file, protocol=protocol)
    for read in (read_paddle, lambda path: load_paddle(paddle, path)):
        with pytest.raises(Refused, match=r"evil\.pdparams was refused: it asks for") as caught:
            read(path)
        assert caught.value.wanted.endswith(f".{function.__name__}")
    assert not called.exists()


def test_os_system_is_named_as_what_it_is(tmp_path):
    """The message of the documentation."""
    path = str(tmp_path / "m.pdparams")
    with open(path, "wb") as file:
        pickle.dump(Evil(os.system, "id"), file)
    with pytest.raises(Refused) as caught:
        read_paddle(path)
    assert str(caught.value) == f"{path} was refused: it asks for posix.system, which a plain state does not need"


def array(*, code=b"f4", order=b"<", shape=b"K\x02\x85", data=b"C\x08" + bytes(8), version=b"K\x01", kind=b"ndarray"):
    dtype = b"cnumpy\ndtype\nX" + len(code).to_bytes(4, "little") + code + b"\x89\x88\x87R"
    dtype += b"(K\x03X\x01\0\0\0" + order + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\n" + kind + b"\nK\0\x85C\x01b\x87R"
    return made + b"(" + version + shape + dtype + b"\x89" + data + b"tb"


ODD = {
    "objects": (array(code=b"O8"), Refused),
    "texts": (array(code=b"S4"), Refused),
    "records": (array(code=b"V8"), Refused),
    "a type of deep tuples": (b"cnumpy\ndtype\nN" + b"\x85" * 2_000_000 + b"R", Refused),
    "a type of lists of lists": (b"cnumpy\ndtype\n]q\0" + b"](h\0h\0eq\0" * 60 + b"\x85R", Refused),
    "another byte order": (array(order=b">"), Refused),
    "a shape that is too large": (array(shape=b"K\x03\x85"), Damaged),
    "a shape of the size of memory": (array(shape=b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86"), Damaged),
    "a negative shape": (array(shape=b"J\xfe\xff\xff\xff\x85"), Damaged),
    "a shape that is none": (array(shape=b"N"), Damaged),
    "a shape of many dimensions": (array(shape=b"(" + b"K\x01" * 65 + b"t", code=b"f8"), Damaged),
    "a large shape without elements": (
        array(shape=b"\x8a\x08" + (1 << 62).to_bytes(8, "little") + b"K\0\x86", code=b"u4", data=b"C\0"),
        Damaged,
    ),
    "elements in a list": (array(data=b"]"), Damaged),
    "another version": (array(version=b"K\x02"), Damaged),
    "another class": (array(kind=b"memmap"), Refused),
    "an array without content": (b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85C\x01b\x87R", Refused),
    "a type as a value": (b"cnumpy\ndtype\nX\x02\0\0\0f4\x89\x88\x87R", Refused),
    "a class as a value": (b"cnumpy\nndarray\n", Refused),
    "a call of the class": (b"cnumpy\nndarray\nK\x7f\x85R", Refused),
    "a scalar of no type": (b"cnumpy.core.multiarray\nscalar\nNC\x01a\x86R", Damaged),
    "a scalar of a wrong size": (
        b"cnumpy.core.multiarray\nscalar\ncnumpy\ndtype\nX\x02\0\0\0f4\x89\x88\x87RC\x01a\x86R",
        Damaged,
    ),
    "a table of names that is none": (b"}X\x1b\0\0\0StructuredToParameterName@@K\x01s", Damaged),
    "a table of names that are not there": (
        b"}X\x1b\0\0\0StructuredToParameterName@@}X\x01\0\0\0aX\x01\0\0\0bss",
        Damaged,
    ),
    "a table of parts that is none": (b"}X\x15\0\0\0UnpackBigParamInfor@@K\x01s", Damaged),
    "a table of parts that are not there": (
        b"}X\x15\0\0\0UnpackBigParamInfor@@}X\x01\0\0\0w}(X\x06\0\0\0slices](X\x01\0\0\0aeX\x0b\0\0\0OriginShapeK\x01\x85uss",
        Damaged,
    ),
    "a table of names that are lists": (
        b"}(X\x1b\0\0\0StructuredToParameterName@@}K\x01]sK\x01" + array() + b"u",
        Damaged,
    ),
    "a table of parts that are made of parts": (
        b"}(X\x15\0\0\0UnpackBigParamInfor@@}(X\x01\0\0\0v}(X\x06\0\0\0slices](X\x01\0\0\0aX\x01\0\0\0be"
        b"X\x0b\0\0\0OriginShapeK\x04\x85u"
        b"X\x01\0\0\0w}(X\x06\0\0\0slices](X\x01\0\0\0veX\x0b\0\0\0OriginShapeK\x04\x85uu"
        + b"X\x01\0\0\0a%bX\x01\0\0\0b%bu"
        % (array(), array()),
        Damaged,
    ),
    "a table of parts with a tuple": (
        b"}X\x15\0\0\0UnpackBigParamInfor@@}X\x01\0\0\0w}(X\x06\0\0\0slices](N"
        + b"q\1h\1\x86" * 90
        + b"eX\x0b\0\0\0OriginShape)uss",
        Damaged,
    ),
    "more dimensions than paddle has": (array(shape=b"(" + b"K\x01" * 20 + b"K\x02t"), Damaged),
    "a tuple of a number": (b"c__builtin__\ntuple\nK\x05\x85R", Damaged),
    "bytes of a size": (b"c__builtin__\nbytes\nJ\xff\xff\xff\x7f\x85R", Damaged),
    "eval, as paddle itself writes it": (b"c__builtin__\neval\nX\x04\0\0\0dataN\x86R", Refused),
    "nothing at all": (b"", Damaged),
}


@pytest.mark.parametrize("what", ODD)
def test_files_that_no_paddle_wrote(tmp_path, what):
    """Each is refused or damaged, and neither numpy nor paddle sees it."""
    text, error = ODD[what]
    (tmp_path / "odd.pdparams").write_bytes(b"\x80\x03" + text + b".")
    with pytest.raises(error, match=r"odd\.pdparams"):
        load_paddle(paddle, str(tmp_path / "odd.pdparams"))


def test_the_file_that_is_odd_in_no_way(tmp_path):
    """What the ones above are made of is an array otherwise."""
    (tmp_path / "a").write_bytes(b"\x80\x03" + array() + b".")
    assert load_paddle(paddle, str(tmp_path / "a")).tolist() == [0, 0]
    state = read_paddle(str(tmp_path / "a")).state
    assert isinstance(state, TensorRef)
    assert isinstance(state.array, ArrayRef)


def test_one_string_of_bytes_is_one_array(tmp_path):
    """A thousand arrays of the same megabyte would be a gigabyte."""
    data = b"B" + (1 << 20).to_bytes(4, "little") + bytes(1 << 20) + b"q\0"
    shape = b"J\x00\x00\x10\x00\x85"
    first = array(code=b"u1", order=b"|", shape=shape, data=data)
    more = array(code=b"u1", order=b"|", shape=shape, data=b"h\0")
    (tmp_path / "a").write_bytes(b"\x80\x03(" + first + more * 1000 + b"t.")
    with pytest.raises(Refused, match="more bytes of arrays than it has"):
        read_paddle(str(tmp_path / "a"))


def test_one_text_is_one_array(tmp_path):
    """The oldest protocol writes bytes as a text. They are not made of it for a thousand arrays."""
    text = b"X" + (1 << 20).to_bytes(4, "little") + b"a" * (1 << 20) + b"q\0"
    shape = b"J\x00\x00\x10\x00\x85"
    first = array(code=b"u1", order=b"|", shape=shape, data=text)
    more = array(code=b"u1", order=b"|", shape=shape, data=b"h\0")
    path = str(tmp_path / "a")
    (tmp_path / "a").write_bytes(b"\x80\x02" + first + b".")
    assert read_paddle(path).state.array.nbytes == 1 << 20
    (tmp_path / "a").write_bytes(b"\x80\x02(" + first + more * 1000 + b"t.")
    tracemalloc.start()
    with pytest.raises(Refused, match="more changes of a value of the type ArrayRef than its size explains"):
        read_paddle(path)
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()


def test_a_state_is_as_deep_as_it_is_without_its_tables(tmp_path):
    """A table can hold each of a thousand nested lists, so that none of them seems to be deep."""
    lists = [[]]
    for _ in range(1000):
        lists.append([lists[-1]])
    cut = {"OriginShape": (2,), "slices": ["part"], "more": lists}
    with open(tmp_path / "a", "wb") as file:
        pickle.dump({"UnpackBigParamInfor@@": {"w": cut}, "part": np.arange(2), "deep": lists[-1]}, file, protocol=4)
    with pytest.raises(Damaged, match=f"it is nested deeper than {DEEPEST} levels"):
        read_paddle(str(tmp_path / "a"))


def test_a_long_list_of_numbers_costs_little_to_save():
    """No more than its text: it may be there at each save."""
    state = {"order": list(range(1_000_000)), "w": paddle.ones([3])}
    tracemalloc.start()
    made, _ = skeleton(paddle, state)
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used < 8 * len(made.text)


def test_strings_of_bytes(tmp_path):
    """They come back as what they were. paddle.load takes them in some places, and not beside tensors."""
    path, state = str(tmp_path / "a"), {"extra": strings_of_bytes()}
    write(path, state)
    assert_same(paddle.load(path), state)
    assert_same(load_paddle(paddle, path), state)
    beside = {"bytes": state, "tensor": paddle.arange(3)}
    write(path, beside)
    assert_same(load_paddle(paddle, path), beside)


def test_one_string_of_bytes_is_read_once(tmp_path):
    """A thousand times the same megabyte, as values and as keys, is a megabyte."""
    text = b"B" + (1 << 20).to_bytes(4, "little") + bytes(1 << 20) + b"q\0"
    (tmp_path / "a").write_bytes(b"\x80\x03](" + text + b"h\0" * 1000 + b"}h\0Ns" * 1000 + b"e.")
    first, *others = read_paddle(str(tmp_path / "a")).state
    assert (type(first), len(first)) == (bytes, 1 << 20)
    assert {id(each if type(each) is bytes else next(iter(each))) for each in others} == {id(first)}


# What a disk could do


@pytest.fixture
def small(tmp_path):
    """A small file of ours, and what is known of it."""
    path = str(tmp_path / "a.pdparams")
    state = {"a": paddle.arange(40, dtype="float32"), "b": paddle.ones([3], "bfloat16"), "LR": {"last_epoch": 3}}
    written = write(path, state)
    return path, Expected(written.size, written.hash)


def test_a_flipped_bit_is_found_wherever_it_is(small):
    """With what was noted, each one is; without, a read gives a state or says what is wrong, no more."""
    path, expected = small
    with open(path, "rb") as file:
        data = bytearray(file.read())
    outcomes = Counter()
    for at in range(len(data)):
        for bit in range(8):
            data[at] ^= 1 << bit
            with open(path, "wb") as file:
                file.write(data)
            data[at] ^= 1 << bit
            with pytest.raises(Damaged):
                verify_file(path, expected, stored=False)
            with pytest.raises((Damaged, Refused)):
                load_paddle(paddle, path, expected=expected)
            try:
                load_paddle(paddle, path)
                outcomes["read"] += 1
            except (Damaged, Refused) as error:
                outcomes[type(error).__name__] += 1
    assert outcomes["read"] > 0
    assert outcomes["Damaged"] > 0


def test_a_cut_is_found_wherever_it_is(small):
    """The file ends anywhere."""
    path, expected = small
    with open(path, "rb") as file:
        data = file.read()
    for size in range(len(data)):
        with open(path, "wb") as file:
            file.write(data[:size])
        for check in (None, expected):
            with pytest.raises(Damaged):
                load_paddle(paddle, path, expected=check)
