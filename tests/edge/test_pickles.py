"""Pickles are read without being run."""

import os
import pickle
import random
import struct
import sys
from collections import OrderedDict

import hypothesis.strategies as st
import pytest
from hypothesis import given

from elastic_adapter.core.checkpoint.files import Damaged, Hole, Refused, Skeleton
from elastic_adapter.core.checkpoint.pickles import PLAIN_NAMES, Constant, Grammar, Known, Machine, set_attributes
from elastic_adapter.core.checkpoint.sources import LONG, FileSource, Span, TextSource
from elastic_adapter.core.checkpoint.trees import DEEPEST, culprit, leaves, replace

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
    """The state of a torch module has one, but none may take the place of a method."""
    state = OrderedDict(a=1)
    state._metadata = {"": {"version": 1}}
    assert load(pickle.dumps(state, protocol=2))._metadata == {"": {"version": 1}}
    for name in (b"items", b"__class__", b"update"):
        named = b"X" + struct.pack("<I", len(name)) + name
        text = pickle.dumps(state, protocol=2).replace(b"X\x09\0\0\0_metadata", named)
        with pytest.raises(Damaged, match="an OrderedDict can't be changed like this"):
            load(text)


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
    assert replace(tree, lambda _, value: value) is tree
    tree = (1,)
    for _ in range(50):
        tree = (tree,) * 10
    changed = replace(tree, lambda _, value: 2 if value == 1 else value)
    for _ in range(50):
        changed = changed[9]
    assert changed == (2,)


def test_a_walk_ends_where_a_list_holds_itself():
    """And every list is changed once."""
    tree = [1, {"a": 2}]
    tree[1]["self"] = tree
    assert list(leaves("x.pt", tree)) == [("0", 1), ("1/a", 2)]
    assert replace(tree, lambda _, value: value + 1) is tree
    assert (tree[0], tree[1]["a"], tree[1]["self"] is tree) == (2, 3, True)


def test_names_tell_the_way():
    """Keys and positions, and a shared value under each of its names."""
    shared = "s"
    tree = {"model": {"fc.weight": shared}, "optimizer": {"state": {0: [shared]}}, (1, "a"): 2.0}
    assert list(leaves("x.pt", tree)) == [("model/fc.weight", "s"), ("optimizer/state/0/0", "s"), ("(1, 'a')", 2.0)]


def test_the_culprit_is_found():
    """By the name of the innermost value that is refused."""

    def check(value):
        if "bad" in repr(value):
            raise Refused("", "")

    assert culprit({"a": 1, "b": [0, {"c": "bad"}]}, check) == "the state at b/1/c"
    assert culprit("bad", check) == "the state"
    assert culprit({"bad": 1}, check) == "the state"
