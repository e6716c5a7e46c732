"""Pickles are read without being run."""

import os
import pickle
import random
import struct
import sys
import tracemalloc
from collections import OrderedDict
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from elastic_adapter.core.checkpoint.files import Damaged, Hole, Refused, Skeleton
from elastic_adapter.core.checkpoint.pickles import PLAIN_NAMES, Constant, Grammar, Known, Machine, set_attributes
from elastic_adapter.core.checkpoint.sources import LONG, FileSource, Span, TextSource
from elastic_adapter.core.checkpoint.trees import DEEPEST, check_depth, culprit, join, leaves, replace

PLAIN = Grammar(PLAIN_NAMES, {OrderedDict: set_attributes})


def load(text, grammar=PLAIN):
    return Machine(TextSource("x.pt", text), grammar).run()


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(min_value=-(1 << 2000), max_value=1 << 2000)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters())
    | st.binary(min_size=1)
)
KEYS = st.text() | st.integers() | st.tuples(st.text(), st.integers()) | st.binary(min_size=1) | st.none()
STATES = st.recursive(
    SCALARS | st.sets(st.integers() | st.text()) | st.binary(min_size=1).map(bytearray),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.dictionaries(KEYS, inner).map(OrderedDict)
        | st.tuples(inner, st.integers(1, 3)).map(lambda pair: [pair[0]] * pair[1])
    ),
    max_leaves=30,
)


@given(STATES, st.integers(2, 5))
def test_plain_values_are_read_as_pickle_reads_them(state, protocol):
    """Whatever is nested in whatever, in every protocol."""
    text = pickle.dumps(state, protocol=protocol)
    found = load(text)
    assert found == pickle.loads(text)
    assert repr(found) == repr(pickle.loads(text))


@given(STATES)
def test_a_file_is_read_like_a_text(state):
    """Through a window that moves."""
    text = pickle.dumps([state, "x" * 40_000, state, "y" * 70_000, state], protocol=4)
    fd = os.memfd_create("pickle")
    try:
        os.write(fd, text)
        assert Machine(FileSource("x.pt", fd), PLAIN).run() == pickle.loads(text)
    finally:
        os.close(fd)


def test_what_is_tied_stays_tied():
    """One object that is there twice is one object, and a list may hold itself."""
    inner = [1]
    found = load(pickle.dumps({"a": inner, "b": inner}))
    assert found["a"] is found["b"]
    inner.append(inner)
    found = load(pickle.dumps(inner))
    assert found[1] is found


def test_attributes_of_an_ordered_dict_are_kept():
    """The state of a torch module has one. Any other is refused: it could be a method, or the shape of a tensor."""
    state = OrderedDict(a=1)
    state._metadata = {"": {"version": 1}}
    assert load(pickle.dumps(state, protocol=2))._metadata == {"": {"version": 1}}
    for name in (b"items", b"__class__", b"update", b"shape"):
        named = b"X" + struct.pack("<I", len(name)) + name
        text = pickle.dumps(state, protocol=2).replace(b"X\x09\0\0\0_metadata", named)
        with pytest.raises(Refused, match=f"an OrderedDict with the attribute '{name.decode()}'"):
            load(text)
    for wrong in (b"K\x05", b"}K\x01K\x02s"):
        with pytest.raises(Damaged, match="an OrderedDict can't be changed like this"):
            load(b"ccollections\nOrderedDict\n)R" + wrong + b"b.")


def test_long_bytes_stay_in_the_file():
    """Shorter ones are read, and know where they were."""
    short, long = random.Random(0).randbytes(LONG - 1), random.Random(1).randbytes(LONG)
    text = pickle.dumps([short, long, long, b"end"], protocol=4)
    fd = os.memfd_create("pickle")
    try:
        os.write(fd, text)
        first, span, same, end = Machine(FileSource("x.pt", fd), PLAIN).run()
    finally:
        os.close(fd)
    assert first == short
    assert text[first.offset :].startswith(short)
    assert isinstance(span, Span)
    assert text[span.offset : span.offset + span.nbytes] == long
    assert same is span
    assert text[end.offset : end.offset + 3] == b"end"


def test_a_skeleton_counts_what_it_leaves_out():
    """Offsets are those of the file that it will be."""
    whole = pickle.dumps([b"a" * 300, b"b" * 300, "c"], protocol=3)
    first, second = whole.index(b"aaa"), whole.index(b"bbb")
    text = whole.replace(b"a" * 300, b"").replace(b"b" * 300, b"")
    holes = (Hole(first, 300), Hole(second - 300, 300))
    assert read_skeleton(Skeleton(text, holes)) == [Span(first, 300), Span(second, 300), "c"]
    for wrong in (
        (),
        (Hole(first, 299), holes[1]),
        (holes[0],),
        (*holes, Hole(second, 4)),
        (Hole(first + 1, 300), holes[1]),
    ):
        with pytest.raises((Damaged, Refused)):
            read_skeleton(Skeleton(text, wrong))


def read_skeleton(skeleton):
    source = TextSource("x.pt", skeleton.text, skeleton)
    found = Machine(source, PLAIN).run()
    source.finish()
    return found


# What a pickle could be made to run


class Calls:
    """Pickles as a call."""

    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


class Made:
    """Pickles as an object of a class."""


GLOBAL = {
    "posix.system": b"cposix\nsystem\n(X\x02\0\0\0idtR.",
    "os.system": b"cos\nsystem\n(X\x02\0\0\0idtR.",
    "builtins.eval": b"c__builtin__\neval\n(X\x01\0\0\0" + b"1tR.",
    "builtins.exec": b"\x80\x04\x8c\x08builtins\x8c\x04exec\x93.",
    "builtins.getattr": b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93\x8c\x02os\x8c\x06system\x86R.",
    "builtins.__import__": b"c__builtin__\n__import__\n(X\x02\0\0\0ostR.",
    "subprocess.Popen": b"csubprocess\nPopen\n(X\x02\0\0\0idtR.",
    "nt.system": b"cnt\nsystem\n(X\x02\0\0\0idtR.",
    "collections.OrderedDict.fromkeys": b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.fromkeys\x93.",
    "pickle.loads": b"cpickle\nloads\n(C\x01.tR.",
    "runpy._run_code": b"crunpy\n_run_code\n.",
    "numpy.load": b"cnumpy\nload\n.",
    "torch.load": b"ctorch\nload\n.",
    "copyreg._reconstructor": b"ccopyreg\n_reconstructor\n.",
    # INST names what it calls in the instruction itself.
    "shutil.rmtree": b"(X\x01\0\0\0/ishutil\nrmtree\n.",
}


@pytest.mark.parametrize("wanted", GLOBAL)
def test_what_is_not_known_is_refused_by_its_name(wanted):
    """Whichever way it is asked for, and nothing of it is run."""
    before = set(sys.modules)
    with pytest.raises(Refused) as caught:
        load(GLOBAL[wanted])
    assert str(caught.value) == f"x.pt was refused: it asks for {wanted}, which a plain state does not need"
    assert (caught.value.path, caught.value.wanted) == ("x.pt", wanted)
    assert set(sys.modules) == before


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("depth", [0, 3])
def test_objects_that_call_are_refused(protocol, depth):
    """As pickle itself writes them, in a state that looks like any other."""
    for value in (Calls(os.system, "id"), Calls(eval, "1"), Made(), Made, print, range(3)):
        state = {"model": [1, 2], "extra": value}
        for _ in range(depth):
            state = {"inner": (state,)}
        with pytest.raises((Refused, Damaged)):
            load(pickle.dumps(state, protocol=protocol))


PERSISTENT = Grammar(PLAIN_NAMES, {}, lambda found: found)
ODD = {
    "a call of a value": b"]q\0)R.",
    "a call of what was called": b"ccollections\nOrderedDict\n)R)R.",
    "a call without a tuple": b"ccollections\nOrderedDict\n]R.",
    "a call with arguments that do not fit": b"c__builtin__\nset\nK\x05\x85R.",
    "a set of something else": b"c__builtin__\nset\nccollections\nOrderedDict\n\x85R.",
    "bytes of a number": b"c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
    "an encoding that is none": b"c_codecs\nencode\nX\x01\0\0\0aX\x03\0\0\0hex\x86R.",
    "a complex of strings": b"c__builtin__\ncomplex\nX\x01\0\0\0a]\x86R.",
    "an object from a class": b"ccollections\nOrderedDict\n)\x81.",
    "an object from a class with names": b"\x80\x04ccollections\nOrderedDict\n)}\x92.",
    "an object of the oldest kind": b"(ccollections\nOrderedDict\no.",
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent id": b"X\x01\0\0\0aQ.",
    "a persistent id of the oldest kind": b"Pabc\n.",
    "a buffer from outside": b"\x80\x05\x97.",
    "a change of a list": b"]}b.",
    "a change of a dict": b"}}b.",
    "a change of a class": b"ccollections\nOrderedDict\n}b.",
    "a list that is none": b"}K\x01a.",
    "more for a list that is none": b"(K\x01K\x02t(K\x03e.",
    "an item of a list": b"]K\0K\x01s.",
    "an item of a class": b"ccollections\nOrderedDict\nK\0K\x01s.",
    "an odd number of items": b"}(K\x01K\x02K\x03u.",
    "a key that is a list": b"}]K\x01s.",
    "a key that is a deep tuple": b"}K\x01\x85\x85K\x01s.",
    "a key that is a long tuple": b"}(" + b"N" * 101 + b"tK\x01s.",
    "a key that is a function": b"}ccollections\nOrderedDict\nK\x01s.",
    "additions to a list": b"]\x80\x04(K\x01\x90.",
    "a name that is a number": b"\x80\x04K\x01\x8c\x01a\x93.",
    "a memo that is empty": b"h\0.",
    "a memo that was never written": b"\x80\x02j\xff\xff\xff\xff.",
    "nothing to remember": b"q\0.",
    "nothing to take": b"\x85.",
    "too little to take": b"K\x01\x86.",
    "no mark": b"K\x01t.",
    "a mark too many": b"(K\x01.",
    "two values": b"K\x01K\x02.",
    "no value": b".",
    "no end": b"K\x01",
    "nothing": b"",
    "an unknown instruction": b"\xff.",
    "an unknown protocol": b"\x80\x63N.",
    "an old number": b"I1\n.",
    "a line without an end": b"c" + b"a" * 5000,
    "text that is none": b"X\x01\0\0\0\xff.",
    "a text beyond the end": b"X\xff\xff\xff\xff.",
    "a text of the size of memory": b"\x8d" + b"\xff" * 8,
    "bytes of the size of memory": b"\x8e" + b"\xff" * 7 + b"\x7f",
    "a bytearray of the size of memory": b"\x96" + b"\xff" * 7 + b"\x7f",
    "a string of a negative size": b"T\xfb\xff\xff\xff" + b"a" * 10 + b".",
    "a number of two gigabytes": b"\x8b\xff\xff\xff\x7f.",
    "half a number": b"G\0\0",
}


@pytest.mark.parametrize("what", ODD)
def test_nonsense_is_an_error_of_the_file(what):
    """Neither another exception nor a value comes of it."""
    with pytest.raises((Refused, Damaged), match=r"^x\.pt (was refused|is damaged): it"):
        load(ODD[what])


def test_a_persistent_id_is_the_formats_own():
    """Where it has any."""
    assert load(b"X\x01\0\0\0aQ.", PERSISTENT) == "a"


def test_a_constant_is_not_called():
    """Nor is a name that has no call."""
    grammar = Grammar({"t.a": Constant("t.a"), "t.b": Known("t.b")}, {})
    assert load(b"ct\na\n.", grammar) == Constant("t.a")
    for name in (b"a", b"b"):
        with pytest.raises(Refused, match=f"a call of t.{name.decode()}"):
            load(b"ct\n" + name + b"\n)R.", grammar)


def test_calls_within_calls_are_refused():
    """Not an error of ours, wherever they end."""

    def call(depth):
        return call(depth + 1)

    with pytest.raises(
        Refused, match=r"x\.pt was refused: it asks for calls within calls, more than Python can follow"
    ):
        load(b"ct\na\nK\0\x85R.", Grammar({"t.a": Known("t.a", call)}, {}))


def test_calls_can_not_multiply_what_is_there():
    """A million copies of a string are more than the file explains."""
    remembered = b"X\x00\x00\x10\x00" + b"a" * (1 << 20) + b"q\0c_codecs\nencode\nq\x01X\x06\0\0\0latin1q\x02"
    with pytest.raises(Refused, match=r"more calls of _codecs\.encode than its size explains"):
        load(b"(" + remembered + b"h\x01h\0h\x02\x86R" * 10_000 + b"t.")
    assert len(load(b"(" + remembered + b"h\x01h\0h\x02\x86R" + b"t.")) == 4


def test_calls_with_many_arguments_are_counted():
    """Ten thousand times the same ten thousand, which nobody has to copy."""
    grammar = Grammar({"t.a": Known("t.a", lambda *_: None)}, {})
    arguments = b"ct\na\nq\0(" + b"N" * 10_000 + b"tq\x01"
    with pytest.raises(Refused, match=r"more calls of t\.a than its size explains"):
        load(b"(" + arguments + b"h\0h\x01R" * 10_000 + b"t.", grammar)
    assert load(b"(" + arguments + b"h\0h\x01R" + b"t.", grammar)[-1] is None


def test_changes_can_not_multiply_what_is_there():
    """Ten thousand things with the same thousand attributes."""
    grammar = Grammar(
        {"t.a": Known("t.a", SimpleNamespace)}, {SimpleNamespace: lambda made, state: vars(made).update(state)}
    )
    names = b"".join(b"X\x04\0\0\0" + f"n{at:03}".encode() + b"N" for at in range(1000))
    made = b"ct\na\nq\x01}(" + names + b"uq\x02"
    with pytest.raises(Refused, match=r"more changes of a value of the type SimpleNamespace than its size explains"):
        load(b"(" + made + b"h\x01)Rh\x02b" * 10_000 + b"t.", grammar)
    assert load(b"(" + made + b"h\x01)Rh\x02b" + b"t.", grammar)[-1].n999 is None


def test_a_key_is_as_much_as_it_was_written():
    """A tuple that is a key of many dicts is not copied for each."""
    key, *dicts = load(b"((" + b"N" * 100 + b"tq\0" + b"}h\0Ns" * 100 + b"t.")
    assert all(next(iter(each)) is key for each in dicts)


# Of all keys of a kind the hash is the same, on any machine.
PRIME, IMAGINARY = sys.hash_info.modulus, sys.hash_info.imag
ALIKE = {
    "ints": [PRIME * at for at in range(20_000)],
    "complex numbers": [complex(-IMAGINARY * at, at) for at in range(20_000)],
    "tuples": [(1, PRIME * at) for at in range(20_000)],
}
INTO = {
    "a dict": (b"}(", b"N", b"u."),
    "a dict, one by one": (b"}", b"Ns", b"."),
    "a set": (b"\x8f(", b"", b"\x90."),
    "a frozenset": (b"(", b"", b"\x91."),
    "a set that is called": (b"c__builtin__\nset\n](", b"", b"e\x85R."),
    "an ordered dict": (b"ccollections\nOrderedDict\n](", b"N\x86", b"e\x85R."),
}


@pytest.mark.parametrize("kind", ALIKE)
@pytest.mark.parametrize("into", INTO)
def test_keys_that_were_made_to_collide_are_refused(kind, into):
    """Of a million such keys a dict takes hours to make, whichever way they get into it."""
    assert len(set(map(hash, ALIKE[kind]))) == 1
    begin, after, end = INTO[into]
    keys = b"".join(pickle.dumps(key, protocol=2)[2:-1] + after for key in ALIKE[kind])
    with pytest.raises(Damaged, match=r"too many keys have the same hash"):
        load(begin + keys + end)


def test_keys_that_honest_dicts_have():
    """Some of them have the same hash as well, and a dict may be long."""
    for keys in (
        [sign << at for at in range(2000) for sign in (1, -1)],
        [2.0**at for at in range(-1000, 1000)],
        [0, False, -1, -2, -1.0, -2.0, 1 << 61, (1 << 61) - 1, (), ((1 << 61) - 1,), (0,), None, "", b"a"],
        [(at, -at, "a", 0.5 * at, None) for at in range(3000)],
        [random.Random(at).getrandbits(128) for at in range(3000)],
        [tuple(range(100))],
    ):
        made = [dict.fromkeys(keys, 1), set(keys), dict.fromkeys(keys, 2)]
        assert load(pickle.dumps(made, protocol=2)) == made


# What a walk over a state meets


def nested(levels, step):
    return load(b"N" + step * levels + b".")


def test_deep_nesting_is_an_error():
    """Not the end of the interpreter."""
    deep = nested(200_000, b"\x85")
    with pytest.raises(Damaged, match=f"it is nested deeper than {DEEPEST} levels"):
        list(leaves("x.pt", deep))
    assert list(leaves("x.pt", nested(DEEPEST, b"\x85"))) == [("/".join("0" * DEEPEST), None)]


def test_a_walk_is_as_long_as_the_pickle():
    """Lists of lists of the same list: there are 10**50 ways through them."""
    tree = [1]
    for _ in range(50):
        tree = [tree] * 10
    assert [value for _, value in leaves("x.pt", tree)] == [1]
    assert replace("x.pt", tree, object, lambda _, value: value) is tree
    tree = (1,)
    for _ in range(50):
        tree = (tree,) * 10
    changed = replace("x.pt", tree, object, lambda _, value: 2 if value == 1 else value)
    for _ in range(50):
        changed = changed[9]
    assert changed == (2,)


def test_a_walk_ends_where_a_list_holds_itself():
    """And every list is changed once."""
    tree = [1, {"a": 2}]
    tree[1]["self"] = tree
    assert list(leaves("x.pt", tree)) == [("0", 1), ("1/a", 2)]
    assert replace("x.pt", tree, object, lambda _, value: value + 1) is tree
    assert (tree[0], tree[1]["a"], tree[1]["self"] is tree) == (2, 3, True)


def test_names_tell_the_way():
    """Keys and positions, and a shared value under each of its names."""
    shared = "s"
    tree = {"model": {"fc.weight": shared}, "optimizer": {"state": {0: [shared]}}, (1, "a"): 2.0}
    assert list(leaves("x.pt", tree)) == [("model/fc.weight", "s"), ("optimizer/state/0/0", "s"), ("(1, 'a')", 2.0)]


@pytest.mark.parametrize(
    "key", ["k" * 10**7, b"k" * 10**7, ("k" * 10**7,), 10**10**4], ids=["str", "bytes", "tuple", "int"]
)
def test_names_are_short_where_keys_are_not(key):
    """What a thousand values below a key of ten megabytes are called fits into a megabyte or two."""
    names = [name for name, _ in leaves("x.pt", {key: list(range(1000))})]
    assert sum(map(len, names)) < 2 << 20
    assert [name.rpartition("/")[2] for name in names] == [str(at) for at in range(1000)]
    replace("x.pt", {key: [1]}, object, lambda name, _: names.append(name))
    assert len(names[-1]) < 2000


def peak(run):
    """How many bytes of memory it takes, beside what there is."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_names_are_short_where_many_keys_are_long():
    """Far below them are ten thousand values; of eleven kilobytes came names of a gigabyte."""
    tree = [None] * 10_000
    for _ in range(98):
        tree = {"k" * 1000: tree}

    def walk():
        assert all(len(name) <= 2000 for name, _ in leaves("x.pt", tree))
        replace("x.pt", tree, object, lambda name, value: value if len(name) <= 2000 else 1 / 0)

    assert peak(walk) < 4 << 20


def test_no_name_is_made_that_nobody_asked_for():
    """Nor is anything else made of each item of a long list."""
    tree = {"order": list(range(1_000_000)), "names": ("a",) * 1_000_000, "last": {5: b"x"}}
    assert list(leaves("x.pt", tree, bytes)) == [("last/5", b"x")]
    assert peak(lambda: list(leaves("x.pt", tree, bytes))) < 1 << 20
    assert peak(lambda: check_depth("x.pt", tree)) < 1 << 20
    assert peak(lambda: replace("x.pt", tree, bytes, lambda name, value: name.encode() + value)) < 1 << 20
    assert tree["last"] == {5: b"last/5x"}


def test_a_key_is_not_written_down_to_be_cut():
    """Each of these is a few bytes in a file that has the text once."""
    long = ("k" * 10**6,) * 100
    assert peak(lambda: join("", long)) < 1 << 20
    assert join("", long) == repr(long)[:1000]


@given(st.lists(SCALARS).map(tuple))
def test_a_tuple_is_named_as_python_writes_it(key):
    """Names are in the manifests of older checkpoints."""
    if len(repr(key)) < 1000:
        assert join("a", key) == f"a/{key!r}"


def test_a_tuple_that_holds_itself_is_refused():
    """What would become of it is not known before it is done; a list that holds itself stays what it is."""
    lists = tuple([] for _ in range(1000))
    for each in lists:
        each.append(lists)
    with pytest.raises(Refused, match=r"x\.pt was refused: it asks for a tuple that holds itself, which"):
        replace("x.pt", lists, int, lambda _, value: value)
    outer = [1]
    outer.append((outer, 1))
    assert replace("x.pt", outer, int, lambda _, value: value + 1) is outer
    assert outer[0] == outer[1][1] == 2
    assert outer[1][0] is outer


def test_a_change_has_a_depth_as_well():
    """The tree may be another one than the one that was listed."""
    with pytest.raises(Damaged, match=f"it is nested deeper than {DEEPEST} levels"):
        replace("x.pt", nested(DEEPEST + 1, b"\x85"), int, lambda _, value: value)


def test_the_culprit_is_found():
    """By the name of the innermost value that is refused."""

    def check(value):
        if "bad" in repr(value):
            raise Refused("", "")

    assert culprit({"a": 1, "b": [0, {"c": "bad"}]}, check) == "the state at b/1/c"
    assert culprit("bad", check) == "the state"
    assert culprit({"bad": 1}, check) == "the state"
