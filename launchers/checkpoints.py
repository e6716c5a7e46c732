"""Looking at a folder of checkpoints: ``elastic-launch checkpoints list`` and ``verify``.

Nothing on the disk is changed, and nobody is asked: a job may write and delete there all the while.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_adapter.core.checkpoint.files import Damaged
from elastic_adapter.core.checkpoint.manifest import (
    MANIFEST,
    BadManifest,
    Manifest,
    folder_name,
    is_quarantined,
    parse_draft,
    parse_folder,
)
from elastic_adapter.core.checkpoint.store import (
    Broken,
    Checkpoint,
    Store,
    is_gone,
    is_unread,
    look_at,
    read_manifest,
)
from elastic_adapter.core.checkpoint.writers import PRUNED
from elastic_adapter.core.errors import UserError

if TYPE_CHECKING:
    from rich.progress import Progress

VARIABLE = "CHECKPOINT_PATH"

HELP = f"""\
usage: elastic-launch checkpoints list [FOLDER] [--json]
       elastic-launch checkpoints verify [FOLDER|CHECKPOINT] [--json]

Shows the checkpoints in a folder, the newest first. Nothing on the disk is changed, and
a job may go on using the folder meanwhile.

  list      what is there, by manifests and sizes of files: quick
  verify    read all files back from the storage and compare them with their checksums;
            what is quarantined already is left out, unless it is named itself

  FOLDER      where a job keeps its checkpoints (default: ${VARIABLE})
  CHECKPOINT  one of them: FOLDER/step-...-gen-...
  --json      one JSON document instead of a table
  -h, --help  show this text

states: complete (not read yet), verified, broken (with the reason), unreadable (whole or
not: it can't be told from here), quarantined (found broken when a job was to go on from
it), being written (a draft; one that grows old was left by a job that was killed), being
deleted, deleted meanwhile

exit codes: 0 fine; 1 verify found a broken or unreadable one; 2 a mistake in the command

examples:
  elastic-launch checkpoints list /data/run7
  elastic-launch checkpoints verify /data/run7/step-000000002000-gen-000003
"""

COMPLETE, VERIFIED, BROKEN, UNREADABLE = "complete", "verified", "broken", "unreadable"
QUARANTINED = "quarantined"
WRITING, DELETING, DELETED = "being written", "being deleted", "deleted meanwhile"
# Work that is done sooner needs no bar.
_PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class File:
    name: str
    size: int
    # By the manifest's algorithm; None: not known.
    hash: str | None = None
    tensors: int | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of one folder, without reading its data."""

    path: Path
    # Of its name.
    step: int
    generation: int
    state: str
    files: tuple[File, ...]
    # Wall clock: when it was made, by its manifest, or last written to. None: it can't be told.
    written_at: float | None
    # What is wrong with it; empty: nothing that was looked for.
    why: str = ""
    # None: there is none that can be trusted.
    manifest: Manifest | None = None

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class Request:
    command: str
    as_json: bool = False
    # None: the variable names it.
    folder: str | None = None


def main(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[str, int]:
    """What to print, and the exit code."""
    request = parse(argv)
    if request is None:
        return HELP, 0
    root, only = _place(*_named(request, environ))
    found = _look(root, only)
    if request.command == "verify":
        found = _verify(root, _checkpoints(found, root, only))
    elif not found and not request.as_json:
        return f"there are no checkpoints in {shown(str(root))}\n", 0
    text = as_json(str(root), found) if request.as_json else table(found, time.time())
    broken = request.command == "verify" and any(each.state in (BROKEN, UNREADABLE) for each in found)
    return text, int(broken)


def parse(argv: Sequence[str]) -> Request | None:
    """What is asked for; None: the help."""
    ours = "elastic-launch checkpoints"
    options = list(argv[: argv.index("--")] if "--" in argv else argv)
    if "--help" in options or "-h" in options:
        return None
    if not argv:
        raise UserError(f"{ours}: expected list or verify, got nothing; {ours} --help tells more")
    command, *rest = argv
    if command not in ("list", "verify"):
        raise UserError(f"{ours}: expected list or verify, got {command!r}; {ours} --help tells more")
    folders: list[str] = []
    as_json, words = False, iter(rest)
    for word in words:
        if word == "--":
            folders += words
        elif word == "--json":
            as_json = True
        elif word.startswith("-"):
            raise UserError(f"{ours} {command}: unknown option {word!r}; {ours} --help lists the options")
        else:
            folders.append(word)
    if len(folders) > 1:
        raise UserError(f"{ours} {command}: expected one folder, got {len(folders)}: {', '.join(map(repr, folders))}")
    return Request(command, as_json, folders[0] if folders else None)


def _named(request: Request, environ: Mapping[str, str]) -> tuple[str, str]:
    """The folder, and how to speak of it in an error."""
    if request.folder is not None:
        return request.folder, f"elastic-launch checkpoints {request.command}: {shown(request.folder) or repr('')}"
    folder = environ.get(VARIABLE)
    if not folder:
        raise UserError(f"elastic-launch checkpoints {request.command}: which folder? name it, or set {VARIABLE}")
    return folder, f"elastic-launch checkpoints {request.command}: {VARIABLE}={shown(folder)}"


def _place(folder: str, spoken: str) -> tuple[Path, str | None]:
    """The folder of all checkpoints, and the one in it that is meant; None: all."""
    try:
        mode = os.stat(folder).st_mode
    except (OSError, ValueError) as error:
        # A name with a NUL in it is a ValueError.
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"{spoken}: expected a folder, and there is none: {why}") from error
    if not stat.S_ISDIR(mode):
        raise UserError(f"{spoken}: expected a folder, and this is none")
    for path in (os.path.abspath(folder), os.path.realpath(folder)):
        if _kind(os.path.basename(path)) is not None:
            return Path(path).parent, os.path.basename(path)
    if os.path.isfile(os.path.join(folder, MANIFEST)):
        # One that has a name of its user's own.
        return Path(path).parent, os.path.basename(path)
    return Path(os.path.abspath(folder)), None


def _kind(name: str) -> tuple[str, tuple[int, int]] | None:
    """What a folder of this name is, unless something is wrong with it; its step and generation. None: not ours."""
    if (draft := parse_draft(name)) is not None:
        step, generation, token = draft
        return (DELETING if token == PRUNED else WRITING), (step, generation)
    place = parse_folder(name.partition(".")[0] if is_quarantined(name) else name)
    return (QUARANTINED if is_quarantined(name) else COMPLETE, place) if place is not None else None


def _look(root: Path, only: str | None) -> tuple[Seen, ...]:
    """Everything of ours below the folder, the newest first. What is deleted meanwhile is not there."""
    if only is not None:
        return tuple(filter(None, (_seen(root / only, named=True),)))
    while True:
        try:
            names = os.listdir(root)
        except OSError as error:
            raise UserError(f"{shown(str(root))}: the folder can't be read: {error.strerror}") from error
        found = [each for name in names if (each := _seen(root / name)) is not None]
        if any(map(_is_finished, names)) and not any(_is_finished(each.path.name) for each in found):
            # All were deleted while they were looked at, because there are newer ones.
            continue
        return tuple(sorted(found, key=lambda each: (each.step, each.generation, each.path.name), reverse=True))


def _is_finished(name: str) -> bool:
    kind = _kind(name)
    return kind is not None and kind[0] == COMPLETE


def _by_manifest(path: Path) -> tuple[str, tuple[int, int]]:
    """As ``_kind``, of a checkpoint that is called otherwise: by ``save_checkpoint``, or because it was renamed."""
    try:
        manifest = read_manifest(path)
    except (OSError, BadManifest):
        return COMPLETE, (0, 0)
    return COMPLETE, (manifest.step, manifest.generation)


def _seen(path: Path, *, named: bool = False) -> Seen | None:
    """What one folder is; None: nothing of ours, or gone. ``named``: the user says that it is a checkpoint."""
    kind = _kind(path.name) or (_by_manifest(path) if named else None)
    if kind is None:
        return None
    state, (step, generation) = kind
    looked = look_at(path, folder_name(step, generation))
    manifest = looked.manifest if isinstance(looked, Checkpoint) else None
    broken = _unlike(looked) if isinstance(looked, Checkpoint) else looked
    try:
        last = path.stat().st_mtime
        files = _files(manifest) if manifest is not None else _on_disk(path)
    except OSError:
        if is_gone(path):
            return None
        # Why, its manifest has told. Or it is a link to something that is gone.
        last, files = None, ()
    if state in (WRITING, DELETING):
        # It is half there, which is not wrong.
        broken = None
    elif state == COMPLETE and broken is not None:
        state = UNREADABLE if broken.unread else BROKEN
    written_at = manifest.created_at if manifest is not None else last
    why = _short(broken.why, path) if broken is not None else ""
    return Seen(path, step, generation, state, files, written_at, why, manifest)


def _unlike(checkpoint: Checkpoint) -> Broken | None:
    """What can be told to be wrong without reading."""
    path = checkpoint.path
    for file in checkpoint.manifest.files:
        try:
            found = os.stat(path / file.name)
        except OSError as error:
            return Broken(path, f"{file.name}: {error.strerror}", unread=is_unread(error))
        if not stat.S_ISREG(found.st_mode):
            return Broken(path, f"{file.name} is no plain file")
        if found.st_size != file.size:
            return Broken(path, f"{file.name} has {found.st_size} bytes instead of {file.size}")
    return None


def _files(manifest: Manifest) -> tuple[File, ...]:
    return tuple(File(file.name, file.size, file.hash, len(file.tensors)) for file in manifest.files)


def _on_disk(path: Path) -> tuple[File, ...]:
    """Raises OSError where the folder is gone; a file that goes is not there."""
    files = []
    with os.scandir(path) as entries:
        for entry in entries:
            try:
                files.append(File(entry.name, entry.stat(follow_symlinks=False).st_size))
            except FileNotFoundError:
                continue
    return tuple(sorted(files, key=lambda file: file.name))


def _short(why: str, path: Path) -> str:
    """Without the folder, which is named beside it."""
    return why.replace(f"{path}{os.sep}", "")


def _checkpoints(found: tuple[Seen, ...], root: Path, only: str | None) -> tuple[Seen, ...]:
    """Those that can be verified: all that count as checkpoints, or the one that was named."""
    if only is not None:
        if not found:
            raise UserError(f"{shown(str(root / only))}: it was deleted while it was looked at")
        if found[0].state in (WRITING, DELETING):
            raise UserError(f"{shown(str(root / only))}: this is {found[0].state}: it is no checkpoint")
        return found
    meant = tuple(each for each in found if each.state in (COMPLETE, BROKEN, UNREADABLE))
    if not meant:
        others = f"; {len(found)} that are quarantined or drafts are left out" if found else ""
        raise UserError(
            f"{shown(str(root))}: there is no checkpoint to verify: "
            f"expected folders that are called step-...-gen-...{others}"
        )
    return meant


def _verify(root: Path, meant: Sequence[Seen]) -> tuple[Seen, ...]:
    store, done = Store(root), []
    with closing(Bar(sum(each.size for each in meant))) as bar:
        for each in meant:
            bar.describe(each.path.name)
            done.append(_verified(store, each, bar))
            bar.reach(sum(one.size for one in done))
    return tuple(done)


def _verified(store: Store, seen: Seen, bar: Bar) -> Seen:
    state, why = VERIFIED, ""
    if seen.manifest is None or seen.why:
        state, why = UNREADABLE if seen.state == UNREADABLE else BROKEN, seen.why
    else:
        try:
            store.check(Checkpoint(seen.path, seen.manifest), stored=True, progress=bar.advance)
        except Damaged as error:
            state, why = BROKEN, str(error)
        except OSError as error:
            state = UNREADABLE if is_unread(error) else BROKEN
            why = f"{error.filename}: {error.strerror}"
    if state != VERIFIED and is_gone(seen.path):
        state, why = DELETED, ""
    return replace(seen, state=state, why=_short(why, seen.path))


class Bar:
    """How far we are, on stderr: shown to a person, once the work has turned out to be long."""

    def __init__(self, total: int) -> None:
        self._due = time.monotonic() + _PATIENCE_S
        self._progress: Progress | None = None
        if sys.stderr.isatty():
            self._progress = _progress()
            self._task = self._progress.add_task("", total=total)

    def describe(self, what: str) -> None:
        if self._progress is not None:
            self._progress.update(self._task, description=what)

    def advance(self, nbytes: int) -> None:
        if self._progress is not None:
            self._progress.advance(self._task, nbytes)
            if time.monotonic() >= self._due:
                self._progress.start()

    def reach(self, nbytes: int) -> None:
        """So many bytes are behind us, read or not."""
        if self._progress is not None:
            self._progress.update(self._task, completed=nbytes)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    words = TextColumn("{task.description}", markup=False)
    columns = (words, BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def as_json(folder: str, found: Sequence[Seen]) -> str:
    values = {"folder": folder, "checkpoints": [_values(each) for each in found]}
    return json.dumps(values, indent=2) + "\n"


def _values(seen: Seen) -> dict[str, Any]:
    """The same keys for all; None: not known."""
    names = ("job", "run", "framework", "versions", "world_size", "algorithm", "created_at", "facts")
    return {
        "name": seen.path.name,
        "path": str(seen.path),
        "state": seen.state,
        "why": seen.why,
        "step": seen.step,
        "generation": seen.generation,
        **{name: getattr(seen.manifest, name, None) for name in names},
        "size": seen.size,
        "files": [asdict(file) for file in seen.files],
    }


def table(found: Sequence[Seen], now: float) -> str:
    """A line for each, however wide: what is searched for is found whole."""
    head = ("step", "generation", "world", "framework", "files", "size", "age", "folder", "state")
    rows = [head, *(_row(each, now) for each in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = {3, 7, 8}
    lines = (
        "  ".join(
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _row(seen: Seen, now: float) -> tuple[str, ...]:
    manifest = seen.manifest
    cells = (
        str(seen.step),
        str(seen.generation),
        str(manifest.world_size) if manifest is not None else "-",
        manifest.framework if manifest is not None else "-",
        str(len(seen.files)),
        size(seen.size),
        age(now - seen.written_at) if seen.written_at is not None else "-",
        seen.path.name,
        f"{seen.state}: {seen.why}" if seen.why else seen.state,
    )
    return tuple(map(shown, cells))


def size(nbytes: int) -> str:
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if round(value, 1) < 1024:  # noqa: PLR2004
            break
        value, unit = value / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"


def age(seconds: float) -> str:
    """In its largest unit, never too much; clocks of other machines may be ahead."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(0, int(seconds))} s"


def shown(text: str) -> str:
    """As it is, if it can be printed on one line; else with escapes in the place of what can't."""
    printable = text if text.isprintable() else repr(text)[1:-1]
    encoding = sys.stdout.encoding or "utf-8"
    return printable.encode(encoding, "backslashreplace").decode(encoding)
