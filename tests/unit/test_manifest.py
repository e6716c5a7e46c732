"""A checkpoint's manifest comes back as it was written, or not at all; and folders are told apart by their names."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_adapter.core.checkpoint.manifest import (
    ALGORITHMS,
    BadManifest,
    FileEntry,
    Manifest,
    TensorEntry,
    folder_name,
    is_quarantined,
    is_temporary,
    manifest_from_bytes,
    manifest_to_bytes,
    md5_lines,
    newest_first,
    obsolete,
    overtaken,
    parse_draft,
    parse_folder,
    quarantine_name,
    temporary_name,
)

# A busy machine is no failure.
LIMITS = settings(deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])

HASH = "0123456789abcdef" * 2
WEIGHT = TensorEntry("layer.weight", (2, 3), "float32", 24, 64, HASH)
MODEL = FileEntry("model.pt", 100, HASH, (WEIGHT, TensorEntry("tied", (2, 3), "float32", 24, 64, HASH)))
SAMPLE = Manifest(
    job="job-1",
    run="17",
    framework="torch",
    versions={"torch": "2.13.0", "python": "3.11.7"},
    step=2000,
    generation=3,
    world_size=8,
    algorithm="xxh3_128",
    files=(MODEL, FileEntry("optimizer.pt", 0, HASH)),
    created_at=1700000000.25,
    facts={"sampler": {"epoch": 1, "position": 640}, "note": "für später"},
)


def sealed(values):
    """What somebody would write who means these values; written apart from the code under test."""

    def text(what):
        return json.dumps(what, separators=(",", ":"), ensure_ascii=False)

    body = {name: value for name, value in values.items() if name != "checksum"}
    return text({**body, "checksum": hashlib.sha256(text(body).encode()).hexdigest()}).encode()


def values_of(manifest):
    return json.loads(manifest_to_bytes(manifest))


def refused(data):
    """The reason, which is one line."""
    with pytest.raises(BadManifest) as caught:
        manifest_from_bytes(data)
    reason = str(caught.value)
    assert reason
    assert reason.isprintable()
    return reason


def texts(most=20):
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=most)


NAMES = st.text(st.characters(categories=["L", "N"], include_characters="-_. "), min_size=1, max_size=20).filter(
    lambda name: name.strip(".") and name != "manifest.json"
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts(), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def manifests(draw):
    algorithm = draw(st.sampled_from(sorted(ALGORITHMS)))
    hashes = st.text("0123456789abcdef", min_size=ALGORITHMS[algorithm], max_size=ALGORITHMS[algorithm])
    sizes = st.integers(0, 2**50)

    def tensor(name):
        return st.builds(
            TensorEntry, st.just(name), st.lists(sizes, max_size=4).map(tuple), texts(), sizes, sizes, hashes
        )

    def file(name):
        tensors = [draw(tensor(each)) for each in draw(st.sets(texts(), max_size=3))]
        size = max((each.offset + each.nbytes for each in tensors), default=0) + draw(sizes)
        return FileEntry(name, size, draw(hashes), tuple(tensors))

    return Manifest(
        job=draw(st.none() | texts()),
        run=draw(st.none() | texts()),
        framework=draw(texts()),
        versions=draw(st.dictionaries(texts(), texts(), max_size=3)),
        step=draw(sizes),
        generation=draw(st.integers(0, 10**6)),
        world_size=draw(st.integers(1, 10**6)),
        algorithm=algorithm,
        files=tuple(file(name) for name in sorted(draw(st.sets(NAMES, min_size=1, max_size=3)))),
        created_at=draw(st.floats(0, 1e12)),
        facts=draw(st.dictionaries(texts(), JSON, max_size=3)),
    )


@LIMITS
@given(manifests())
def test_it_comes_back_as_it_was(manifest):
    """Every value, of the same type; and the same bytes when it is written again."""
    data = manifest_to_bytes(manifest)
    again = manifest_from_bytes(data)
    assert again == manifest
    assert manifest_to_bytes(again) == data


def test_what_is_written_is_for_other_tools_too():
    """Plain JSON, whose checksum anybody can compute: sha256 of the same text without it."""
    data = manifest_to_bytes(SAMPLE)
    assert data == sealed(json.loads(data))
    assert json.loads(data)["format"] == 1
    assert json.loads(data)["files"][0]["tensors"][0]["offset"] == 64
    assert "für später".encode() in data


@pytest.mark.parametrize("mask", [0x01, 0x20, 0x80, 0xFF])
def test_every_changed_byte_is_noticed(mask):
    """Wherever it is."""
    data = manifest_to_bytes(SAMPLE)
    for place in range(len(data)):
        refused(data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :])


@LIMITS
@given(manifests(), st.data())
def test_damage_is_noticed(manifest, data):
    """Cut off, lengthened, something put in or left out: it is refused."""
    whole = manifest_to_bytes(manifest)
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, len(whole)))
    damaged = whole[:start] + data.draw(st.binary(max_size=8)) + whole[end:]
    if damaged != whole:
        refused(damaged)


def places(values, path=()):
    """The path to every value in a tree."""
    yield path
    inner = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in inner:
        yield from places(value, (*path, key))


def changed(values, path, change):
    """The same tree, with ``change(container, key)`` done at the end of the path."""
    tree = [copy.deepcopy(values)]
    container, key = tree, 0
    for each in path:
        container, key = container[key], each
    change(container, key)
    return tree[0]


JUNK = JSON | st.sampled_from([-1, True, 1.5, "../x", "/etc/passwd", "a/b", "", ".", "x\n", 10**30, [], {}, "\ud800"])


@LIMITS
@given(manifests(), st.data())
def test_a_wrong_value_is_refused_or_harmless(manifest, data):
    """Whatever stands anywhere in its place, under a right checksum: one kind of error, or a manifest as good as any."""
    values = values_of(manifest)
    path = data.draw(st.sampled_from(list(places(values))))
    what = data.draw(st.sampled_from(["replace", "remove", "add", "repeat"]))
    junk = data.draw(JUNK)

    def change(container, key):
        if what == "remove":
            del container[key]
        elif what == "replace" or not isinstance(container[key], dict | list):
            container[key] = junk
        elif isinstance(container[key], dict):
            container[key]["another"] = junk
        elif what == "repeat" and container[key]:
            container[key].append(container[key][0])
        else:
            container[key].append(junk)

    # Removing the whole leaves no object to seal.
    tree = changed(values, path, change) if path or what != "remove" else {}
    if not isinstance(tree, dict):
        refused(json.dumps(tree).encode())
        return
    try:
        written = sealed(tree)
    except UnicodeEncodeError:
        refused(json.dumps(tree).encode())
        return
    try:
        read = manifest_from_bytes(written)
    except BadManifest:
        refused(written)
    else:
        assert manifest_from_bytes(manifest_to_bytes(read)) == read


def without(values, *path):
    return changed(values, path, lambda container, key: container.pop(key))


def with_(values, value, *path):
    return changed(values, path, lambda container, key: container.__setitem__(key, value))


GOOD = values_of(SAMPLE)
FILE = ("files", 0)
TENSOR = ("files", 0, "tensors", 0)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (without(GOOD, "format"), "the manifest has no format number"),
        (with_(GOOD, True, "format"), "the manifest has no format number"),
        (with_(GOOD, 2, "format"), "the manifest's format 2 is not known here: 1 is"),
        (without(GOOD, "step"), "the manifest has no step"),
        (without(without(GOOD, "step"), "run"), "the manifest has no run and no step"),
        (with_(GOOD, 1, "epoch"), "the manifest has unknown keys: 'epoch'"),
        (with_(GOOD, "2000", "step"), "step of the manifest must be int, got '2000'"),
        (with_(GOOD, True, "step"), "step of the manifest must be int, got True"),
        (with_(GOOD, 2.0, "step"), "step of the manifest must be int, got 2.0"),
        (with_(GOOD, 7, "job"), "job of the manifest must be str or NoneType, got 7"),
        (with_(GOOD, -1, "step"), "the manifest's step must be at least 0, got -1"),
        (with_(GOOD, 0, "world_size"), "the manifest's world_size must be at least 1, got 0"),
        (with_(GOOD, 2, "versions", "torch"), "a version must be str, got 2"),
        (with_(GOOD, "md4", "algorithm"), "hashes by 'md4' are not known here: xxh3_128, sha256 are"),
        (with_(GOOD, [], "files"), "the manifest names no file"),
        (with_(GOOD, ["x"], "files"), "a file is no object: 'x'"),
        (with_(GOOD, [*GOOD["files"], GOOD["files"][0]], "files"), "the manifest names file 'model.pt' twice"),
        (with_(GOOD, "ABC", *FILE, "hash"), "'ABC' of 'model.pt' is no xxh3_128 of 32 hexadecimal digits"),
        (with_(GOOD, -1, "files", 1, "size"), "file 'optimizer.pt' has a size of -1"),
        (without(GOOD, *FILE, "tensors"), "a file has no tensors"),
        (with_(GOOD, [2, -3], *TENSOR, "shape"), "tensor 'layer.weight' has a dimension of -3"),
        (with_(GOOD, [2, True], *TENSOR, "shape"), "a dimension must be int, got True"),
        (with_(GOOD, -1, *TENSOR, "nbytes"), "tensor 'layer.weight' has a size of -1"),
        (with_(GOOD, -1, *TENSOR, "offset"), "tensor 'layer.weight' has an offset of -1"),
        (
            with_(GOOD, 77, *TENSOR, "offset"),
            "tensor 'layer.weight' would end at byte 101 of 100 of file 'model.pt'",
        ),
        (with_(GOOD, "tied", *TENSOR, "name"), "file 'model.pt' holds tensor 'tied' twice"),
        (with_(GOOD, "", *TENSOR, "hash"), "'' of 'layer.weight' is no xxh3_128 of 32 hexadecimal digits"),
    ],
)
def test_malformed(values, reason):
    """Refused in one line that says what is wrong, although its checksum is right."""
    assert refused(sealed(values)) == reason


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the manifest is not JSON: Expecting value: line 1 column 1 (char 0)"),
        (b"\xff\xfe", "the manifest is not JSON: 'utf-8' codec can't decode byte 0xff in position 0"),
        (b"[]", "the manifest has no format number"),
        (b'{"format":1,"format":1}', "the manifest has key 'format' twice"),
        (b'{"format":1,"step":NaN}', "the manifest can't be written as JSON: Out of range float values"),
        (b'{"format":1,"job":"\\ud800"}', "the manifest can't be written as JSON: 'utf-8' codec can't encode"),
        (b"[" * 100_000, "the manifest is not JSON: "),
        (manifest_to_bytes(SAMPLE) + b"\n", "the manifest's checksum does not match: it was damaged or edited"),
        (json.dumps(GOOD, indent=1).encode(), "the manifest's checksum does not match: it was damaged or edited"),
    ],
    ids=lambda value: value[:20] if isinstance(value, bytes) else "",
)
def test_not_even_a_manifest(data, reason):
    """Whatever lies there instead."""
    assert refused(data).startswith(reason)


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "a/b", "a/", "", ".", "..", "a\\b", "a\nb", "a\0b", "\ud800", "x" * 201, "é" * 101],
)
def test_a_file_stays_in_its_folder(name):
    """No name leads out of it, or is read differently by other tools."""
    with pytest.raises(BadManifest, match="is no plain name of a file in the checkpoint's folder"):
        FileEntry(name, 0, HASH)


@pytest.mark.parametrize("name", ["manifest.json", "checkpoints.md5", temporary_name("model.pt", "7")])
def test_names_that_mean_something_else(name):
    """The manifest is no part of what it describes, and what looks temporary would be swept away."""
    with pytest.raises(BadManifest, match="is not a name for data"):
        FileEntry(name, 0, HASH)


@pytest.mark.parametrize("facts", [{"a": float("nan")}, {"a": (1, 2)}, {1: 2}, {"a": object()}, {"a": b"x"}])
def test_facts_are_plain(facts):
    """What would come back as something else is refused when it is written."""
    with pytest.raises(BadManifest, match="the manifest's facts must be plain JSON"):
        replace(SAMPLE, facts=facts)


def test_what_can_not_be_written():
    """A name that is no text, or a time that is no number."""
    with pytest.raises(BadManifest, match="can't be written as JSON"):
        manifest_to_bytes(replace(SAMPLE, job="\udc80"))
    with pytest.raises(BadManifest, match="can't be written as JSON"):
        manifest_to_bytes(replace(SAMPLE, created_at=float("inf")))


class TestFolders:
    """A folder's name says which checkpoint it is."""

    def test_name(self):
        """Easy to read, and the same width for all."""
        assert folder_name(2000, 3) == "step-000000002000-gen-000003"
        assert parse_folder("step-000000002000-gen-000003") == (2000, 3)

    @LIMITS
    @given(st.integers(0, 10**18 - 1), st.integers(0, 10**18 - 1))
    def test_round_trip(self, step, generation):
        """Whatever the numbers."""
        assert parse_folder(folder_name(step, generation)) == (step, generation)

    @LIMITS
    @given(st.lists(st.tuples(st.integers(0, 10**12 - 1), st.integers(0, 10**6 - 1)), max_size=8))
    def test_they_sort_by_name(self, pairs):
        """In any tool: by the step, then by the generation."""
        assert sorted(folder_name(*pair) for pair in pairs) == [folder_name(*pair) for pair in sorted(pairs)]

    @pytest.mark.parametrize(("step", "generation"), [(-1, 0), (0, -1), (10**18, 0), (0, 10**18)])
    def test_refused(self, step, generation):
        """What could not be read back."""
        with pytest.raises(ValueError, match="no folder can be named"):
            folder_name(step, generation)

    @pytest.mark.parametrize(
        "name",
        [
            "",
            "step-2000-gen-3",
            "step-0000000002000-gen-000003",
            "step-000000002000-gen-0000003",
            "step-000000002000-gen-000003\n",
            "step-000000002000-gen-000003.broken",
            "step-00000000200٣-gen-000003",
            "xstep-000000002000-gen-000003",
        ],
    )
    def test_other_names(self, name):
        """Only exactly what is written here is read; one checkpoint has one name."""
        assert parse_folder(name) is None

    @LIMITS
    @given(st.text(max_size=40))
    def test_any_other_name(self, name):
        """A name that is read is the one that is written."""
        place = parse_folder(name)
        assert place is None or folder_name(*place) == name

    def test_temporary(self):
        """Told from everything else by its name, whoever writes it."""
        name = temporary_name(folder_name(1, 2), "b7-41")
        assert name == ".step-000000000001-gen-000002.b7-41.elastic-tmp"
        assert is_temporary(name)
        assert parse_folder(name) is None
        assert not any(map(is_temporary, (folder_name(1, 2), ".x.tmp", "x.elastic-tmp", "model.pt")))
        with pytest.raises(ValueError, match="a token has letters"):
            temporary_name("x", "a/b")

    def test_drafts(self):
        """Whose they are, and of which step, is in their names; of the same writers the older ones are overtaken."""
        mine = [temporary_name(folder_name(*place), "run1") for place in ((1, 9), (2, 1), (2, 2), (3, 1))]
        assert [parse_draft(name) for name in mine] == [(1, 9, "run1"), (2, 1, "run1"), (2, 2, "run1"), (3, 1, "run1")]
        others = [temporary_name(folder_name(1, 1), "run2"), temporary_name("model.pt", "run1"), folder_name(1, 1), "x"]
        assert [parse_draft(name) for name in others] == [(1, 1, "run2"), None, None, None]
        assert overtaken([*mine, *others], 2, 2, "run1") == tuple(mine[:2])

    def test_quarantined(self):
        """A broken one is no checkpoint any more, and a second one of the same name finds a place."""
        folder = folder_name(1, 2)
        first = quarantine_name(folder, [folder])
        second = quarantine_name(folder, [folder, first])
        third = quarantine_name(folder, [first, second])
        assert (first, second, third) == (f"{folder}.broken", f"{folder}.broken-2", f"{folder}.broken-3")
        assert all(is_quarantined(each) and parse_folder(each) is None for each in (first, second, third))
        assert not any(map(is_quarantined, (folder, "x.broken", f"{first}-x", temporary_name(first, "t"))))

    def test_newest_first(self):
        """By step, then by generation; what is no checkpoint is left out."""
        names = [folder_name(10, 3), folder_name(10**13, 1), folder_name(9, 7), folder_name(10, 2)]
        others = ["lost+found", temporary_name(names[0], "t"), quarantine_name(names[0], [])]
        assert newest_first([*others, *names]) == (names[1], names[0], names[3], names[2])


class TestObsolete:
    """What need not be kept."""

    @pytest.mark.parametrize(
        ("steps", "keep_last", "keep_every", "gone"),
        [
            ([1, 2, 3, 4], None, None, []),
            ([1, 2, 3, 4], 2, None, [1, 2]),
            ([1, 2, 3, 4], 9, None, []),
            ([1, 2, 3, 4], 1, None, [1, 2, 3]),
            ([1, 2, 3, 4], 0, None, [1, 2, 3]),
            ([100, 150, 200, 250, 300], 1, 100, [150, 250]),
            ([100, 150, 200, 250, 300], 2, 200, [100, 150]),
            ([100, 200], None, 100, []),
            ([], 3, 10, []),
        ],
    )
    def test_table(self, steps, keep_last, keep_every, gone):
        """The last ones are kept, and those at round steps for ever; the oldest goes first."""
        folders = [folder_name(step, 1) for step in steps]
        newest = folders[-1] if folders else folder_name(1, 1)
        found = obsolete(reversed(folders), newest, keep_last, keep_every)
        assert found == tuple(folder_name(step, 1) for step in gone)

    @pytest.mark.parametrize(("saved", "gone"), [(4, [1, 2, 3]), (3, [1, 2]), (2, [1]), (1, []), (9, [])])
    def test_those_with_more_steps(self, saved, gone):
        """Do not count, and stay."""
        folders = [folder_name(step, 1) for step in (1, 2, 3, 4)]
        assert obsolete(folders, folder_name(saved, 1), 1) == tuple(folder_name(step, 1) for step in gone)

    def test_generations_of_one_step(self):
        """Each is one of the last by itself."""
        folders = [folder_name(5, 1), folder_name(5, 2), folder_name(6, 2)]
        assert obsolete(folders, folders[-1], 2) == (folders[0],)
        assert obsolete(folders, folders[-1], 1, 5) == ()
        assert obsolete(folders, folders[1], 1) == (folders[0],)

    @LIMITS
    @given(
        st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3)), unique=True, min_size=1),
        st.none() | st.integers(0, 9),
        st.none() | st.integers(1, 9),
        st.data(),
    )
    def test_never_what_was_saved(self, pairs, keep_last, keep_every, data):
        """Whatever is asked for, nor one with more steps; and no more is kept than was asked for."""
        folders = [folder_name(*pair) for pair in pairs]
        saved = data.draw(st.sampled_from(folders))
        gone = obsolete([*folders, "notes.txt"], saved, keep_last, keep_every)
        kept = [folder for folder in newest_first(folders) if folder not in gone and folder <= saved]
        assert kept[0] == saved
        assert set(gone) <= {folder for folder in folders if folder < saved}
        beyond = [folder for folder in kept if keep_every is None or parse_folder(folder)[0] % keep_every]
        assert keep_last is None or len(beyond) <= max(1, keep_last)


class TestMd5:
    """For md5sum -c."""

    def test_lines(self):
        """Sorted by path, in md5sum's own format."""
        text = md5_lines({"step-1/b.pt": "0" * 32, "a b.pt": "f" * 32})
        assert text == f"{'f' * 32}  a b.pt\n{'0' * 32}  step-1/b.pt\n"
        assert md5_lines({}) == ""

    @pytest.mark.parametrize(
        ("path", "digest"), [("../x", "0" * 32), ("/x", "0" * 32), ("a\nb", "0" * 32), ("x", "0" * 31), ("x", "G" * 32)]
    )
    def test_refused(self, path, digest):
        """What md5sum would read as something else."""
        with pytest.raises(BadManifest, match=re.escape(repr(path))):
            md5_lines({path: digest})
