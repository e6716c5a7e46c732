"""What is written beside a checkpoint's data, so that it can be verified; and how its folder is called. Pure.

A checkpoint is a folder of files with a manifest, which is written last. The manifest names every file with its size
and hash, every tensor with its place in the file and its hash, and carries a checksum of itself: a byte that changed
anywhere is found. It does not protect against somebody who means harm and can compute the checksums anew.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from elastic_adapter.core.errors import ElasticError, in_one_line

# Raised when a reader of this version would misread what is written.
FORMAT = 1
MANIFEST = "manifest.json"
MD5_SUMS = "checkpoints.md5"
# The hashes known here, and how many hexadecimal digits each has.
ALGORITHMS = {"xxh3_128": 32, "sha256": 64}

_FOLDER = re.compile(r"step-([0-9]{12,18})-gen-([0-9]{6,18})")
_BROKEN = re.compile(_FOLDER.pattern + r"\.broken(-[0-9]+)?")
_TEMPORARY = ".elastic-tmp"
_HEX = re.compile(r"[0-9a-f]+")
_TOKEN = re.compile(r"[0-9A-Za-z_-]+")
# Leaves room in what file systems allow (255) for what a temporary name adds.
_LONGEST_NAME = 200
_LONGEST_QUOTE = 60


class BadManifest(ElasticError):
    """A manifest, or a part of one, that can't be trusted. Nothing of it may be used."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor's bytes in a file. Tensors that share memory may share their bytes there."""

    name: str
    shape: tuple[int, ...]
    # In the framework's words.
    dtype: str
    nbytes: int
    # Where its bytes begin in the file.
    offset: int
    # Of these bytes, by the manifest's algorithm.
    hash: str

    def __post_init__(self) -> None:
        for what, value in (
            ("a size", self.nbytes),
            ("an offset", self.offset),
            *(("a dimension", d) for d in self.shape),
        ):
            if value < 0:
                raise BadManifest(f"tensor {_quoted(self.name)} has {what} of {value}")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of the checkpoint's folder."""

    name: str
    size: int
    # Of the whole file, by the manifest's algorithm.
    hash: str
    tensors: tuple[TensorEntry, ...] = ()

    def __post_init__(self) -> None:
        if not _is_plain(self.name):
            raise BadManifest(f"{_quoted(self.name)} is no plain name of a file in the checkpoint's folder")
        if self.name in (MANIFEST, MD5_SUMS) or is_temporary(self.name):
            raise BadManifest(f"{_quoted(self.name)} is not a name for data")
        if self.size < 0:
            raise BadManifest(f"file {_quoted(self.name)} has a size of {self.size}")
        _once((each.name for each in self.tensors), f"file {_quoted(self.name)} holds tensor")
        for tensor in self.tensors:
            if tensor.offset + tensor.nbytes > self.size:
                end = f"byte {tensor.offset + tensor.nbytes} of {self.size}"
                raise BadManifest(f"tensor {_quoted(tensor.name)} would end at {end} of file {_quoted(self.name)}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that is known of a checkpoint without reading its data."""

    # None: saved without a launcher.
    job: str | None
    run: str | None
    framework: str
    # Of the framework, of Python and of whatever else matters, by name.
    versions: dict[str, str]
    # How many steps were done, which is the step to go on from.
    step: int
    # 0 without a launcher.
    generation: int
    world_size: int
    # How all hashes were made.
    algorithm: str
    files: tuple[FileEntry, ...]
    # Wall clock, for people.
    created_at: float
    # Whatever else rides along as plain JSON, such as the sampler's state.
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in (("step", 0), ("generation", 0), ("world_size", 1)):
            if getattr(self, name) < least:
                raise BadManifest(f"the manifest's {name} must be at least {least}, got {getattr(self, name)}")
        if not self.files:
            raise BadManifest("the manifest names no file")
        _once((each.name for each in self.files), "the manifest names file")
        self._check_hashes()
        if not _is_json(self.facts):
            raise BadManifest(f"the manifest's facts must be plain JSON: {_quoted(self.facts)}")

    def _check_hashes(self) -> None:
        digits = ALGORITHMS.get(self.algorithm)
        if digits is None:
            raise BadManifest(f"hashes by {_quoted(self.algorithm)} are not known here: {', '.join(ALGORITHMS)} are")
        hashes = [(each.name, each.hash) for file in self.files for each in file.tensors]
        for name, digest in (*((file.name, file.hash) for file in self.files), *hashes):
            if len(digest) != digits or not _HEX.fullmatch(digest):
                what = f"{_quoted(digest)} of {_quoted(name)}"
                raise BadManifest(f"{what} is no {self.algorithm} of {digits} hexadecimal digits")


def manifest_to_bytes(manifest: Manifest) -> bytes:
    return _sealed({"format": FORMAT, **asdict(manifest), "created_at": float(manifest.created_at)})


def manifest_from_bytes(data: bytes) -> Manifest:
    """Raises ``BadManifest``, with the reason in one line, unless every byte is as it was written."""
    values = _parsed(data)
    if type(values) is not dict or type(values.get("format")) is not int:
        raise BadManifest("the manifest has no format number")
    if values["format"] != FORMAT:
        raise BadManifest(f"the manifest's format {values['format']} is not known here: {FORMAT} is")
    body = {name: value for name, value in values.items() if name != "checksum"}
    if _sealed(body) != data:
        raise BadManifest("the manifest's checksum does not match: it was damaged or edited")
    del body["format"]
    taken = _taken(body, "the manifest", _MANIFEST)
    _all_of(str, taken["versions"].values(), "a version")
    return Manifest(**{**taken, "files": tuple(_file(each) for each in taken["files"])})


def _sealed(body: dict[str, Any]) -> bytes:
    """As it is written: its own checksum is its last value."""
    return _dumped({**body, "checksum": hashlib.sha256(_dumped(body)).hexdigest()})


def _dumped(values: dict[str, Any]) -> bytes:
    try:
        return json.dumps(values, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadManifest(f"the manifest can't be written as JSON: {in_one_line(error)}") from error


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data.decode(), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise BadManifest(f"the manifest is not JSON: {in_one_line(error)}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _once((name for name, _ in pairs), "the manifest has key")
    return dict(pairs)


# Exactly these keys, of exactly these types (a bool is no int).
_TENSOR = {"name": (str,), "shape": (list,), "dtype": (str,), "nbytes": (int,), "offset": (int,), "hash": (str,)}
_FILE = {"name": (str,), "size": (int,), "hash": (str,), "tensors": (list,)}
_MANIFEST = {
    "job": (str, type(None)),
    "run": (str, type(None)),
    "framework": (str,),
    "versions": (dict,),
    "step": (int,),
    "generation": (int,),
    "world_size": (int,),
    "algorithm": (str,),
    "files": (list,),
    "created_at": (float,),
    "facts": (dict,),
}


def _taken(values: Any, what: str, kinds: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    if type(values) is not dict:
        raise BadManifest(f"{what} is no object: {_quoted(values)}")
    if missing := [name for name in kinds if name not in values]:
        raise BadManifest(f"{what} has no {' and no '.join(missing)}")
    if unknown := [name for name in values if name not in kinds]:
        raise BadManifest(f"{what} has unknown keys: {', '.join(map(_quoted, unknown))}")
    for name, types in kinds.items():
        if type(values[name]) not in types:
            wanted = " or ".join(each.__name__ for each in types)
            raise BadManifest(f"{name} of {what} must be {wanted}, got {_quoted(values[name])}")
    return dict(values)


def _file(values: Any) -> FileEntry:
    taken = _taken(values, "a file", _FILE)
    return FileEntry(**{**taken, "tensors": tuple(_tensor(each) for each in taken["tensors"])})


def _tensor(values: Any) -> TensorEntry:
    taken = _taken(values, "a tensor", _TENSOR)
    _all_of(int, taken["shape"], "a dimension")
    return TensorEntry(**{**taken, "shape": tuple(taken["shape"])})


def _all_of(kind: type, values: Iterable[Any], what: str) -> None:
    for value in values:
        if type(value) is not kind:
            raise BadManifest(f"{what} must be {kind.__name__}, got {_quoted(value)}")


def _once(names: Iterable[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise BadManifest(f"{what} {_quoted(name)} twice")
        seen.add(name)


def _is_json(values: dict[str, Any]) -> bool:
    """Whether it comes back from JSON as it was."""
    try:
        return type(values) is dict and json.loads(json.dumps(values, allow_nan=False)) == values
    except (TypeError, ValueError, RecursionError):
        return False


def _is_plain(name: str) -> bool:
    """Whether it is the name of something in a folder, and looks the same in every tool."""
    fits = 0 < len(name.encode(errors="replace")) <= _LONGEST_NAME
    return fits and name not in (".", "..") and name.isprintable() and not set(name) & {"/", "\\"}


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}..."


def md5_lines(hashes: Mapping[str, str]) -> str:
    """The text of ``checkpoints.md5``, for ``md5sum -c``: from paths, seen from its folder, to their MD5 hashes."""
    for path, digest in hashes.items():
        if not all(map(_is_plain, path.split("/"))):
            raise BadManifest(f"{_quoted(path)} is no path within the folder")
        if not re.fullmatch(r"[0-9a-f]{32}", digest):
            raise BadManifest(f"{_quoted(digest)} of {_quoted(path)} is no MD5 hash")
    return "".join(f"{digest}  {path}\n" for path, digest in sorted(hashes.items()))


def folder_name(step: int, generation: int) -> str:
    """The folder of the checkpoint with so many steps done: names sort as steps do, then as generations do."""
    name = f"step-{step:012d}-gen-{generation:06d}"
    if step < 0 or generation < 0 or not _FOLDER.fullmatch(name):
        raise ValueError(f"no folder can be named by step {step} and generation {generation}")
    return name


def parse_folder(name: str) -> tuple[int, int] | None:
    """Step and generation; None: no checkpoint is called so."""
    found = _FOLDER.fullmatch(name)
    if found is None:
        return None
    step, generation = int(found[1]), int(found[2])
    # One checkpoint, one name.
    return (step, generation) if folder_name(step, generation) == name else None


def temporary_name(name: str, token: str) -> str:
    """How a file or folder is called while it is written; the token tells writers apart."""
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"a token has letters, digits, - and _ only, got {token!r}")
    return f".{name}.{token}{_TEMPORARY}"


def is_temporary(name: str) -> bool:
    """Whether it is what a save left half done. Nobody else's hidden files are called so."""
    return name.startswith(".") and name.endswith(_TEMPORARY)


def parse_draft(name: str) -> tuple[int, int, str] | None:
    """Step, generation and token of a checkpoint that is being written; None: none is called so."""
    if not is_temporary(name):
        return None
    folder, _, token = name[1 : -len(_TEMPORARY)].partition(".")
    place = parse_folder(folder)
    return (*place, token) if place is not None and _TOKEN.fullmatch(token) else None


def overtaken(names: Iterable[str], step: int, generation: int, token: str) -> tuple[str, ...]:
    """The drafts of the same writers that can't be finished any more, now that this one is."""
    parsed = {name: draft for name in names if (draft := parse_draft(name)) is not None}
    return tuple(name for name, draft in parsed.items() if draft[2] == token and draft[:2] < (step, generation))


def quarantine_name(folder: str, taken: Collection[str]) -> str:
    """How a broken checkpoint is called from now on: a name that is not taken."""
    name, number = f"{folder}.broken", 1
    while name in taken:
        number += 1
        name = f"{folder}.broken-{number}"
    return name


def is_quarantined(name: str) -> bool:
    return _BROKEN.fullmatch(name) is not None


def newest_first(folders: Iterable[str]) -> tuple[str, ...]:
    """The checkpoints among these names, the one with the most steps first; of one step, the latest generation."""
    parsed = {name: place for name in folders if (place := parse_folder(name)) is not None}
    return tuple(sorted(parsed, key=parsed.__getitem__, reverse=True))


def obsolete(
    folders: Iterable[str], saved: str, keep_last: int | None, keep_every: int | None = None
) -> tuple[str, ...]:
    """Which of these checkpoints need not be kept now that this one is saved, the oldest first; never that one.

    Those with more steps do not count, and stay: whoever has gone back behind them goes on from here. Pass only those
    that are complete: a half one would be counted among the last.
    """
    if keep_last is None:
        return ()
    ordered = newest_first(folders)
    older = ordered[ordered.index(saved) + max(keep_last, 1) :] if saved in ordered else ()
    return tuple(name for name in reversed(older) if not _is_kept_for_ever(name, keep_every))


def _is_kept_for_ever(folder: str, keep_every: int | None) -> bool:
    place = parse_folder(folder)
    return keep_every is not None and place is not None and place[0] % keep_every == 0
