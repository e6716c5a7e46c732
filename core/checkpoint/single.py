"""One checkpoint as one folder, saved and loaded while the caller waits: for loops that keep their own books."""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import time
from pathlib import Path
from typing import Any

from elastic_adapter.core.checkpoint.calls import plainly
from elastic_adapter.core.checkpoint.contents import Training, check_things, states
from elastic_adapter.core.checkpoint.files import FOLDER, PLAIN, Damaged, kind_of, path_of
from elastic_adapter.core.checkpoint.framework import Framework
from elastic_adapter.core.checkpoint.manifest import (
    MANIFEST,
    BadManifest,
    FileEntry,
    Manifest,
    is_temporary,
    temporary_name,
)
from elastic_adapter.core.checkpoint.overwriting import check_replaceable
from elastic_adapter.core.checkpoint.policy import whole
from elastic_adapter.core.checkpoint.restoring import Restoring, load_file, step_of, values_of
from elastic_adapter.core.checkpoint.saving import WRITERS, entry_of, read_back
from elastic_adapter.core.checkpoint.store import VERIFY, Checkpoint, Draft, read_manifest, sync_folder
from elastic_adapter.core.checkpoint.writers import OLD, SWEPT, is_in_use, own_token
from elastic_adapter.core.errors import UserError, one_of

_ALGORITHM = "xxh3_128"
# Facts of a manifest that mean something to a Checkpointer only.
_OF_A_CHECKPOINTER = ("sampler", "own_epoch", "calls_step")
# What a draft's name adds to its folder's. What was being deleted has got another ending, with each try; then also what
# was put aside to be replaced is nobody's only copy any more.
_OF_A_DRAFT = re.compile(rf"([0-9a-f]{{8}}\.(?!{OLD}\.)[^.]+|{OLD}(?=\.[^.]+\.{SWEPT}\.))\.[^.]+(\.{SWEPT}\.[^.]+)*")
_AT_FDCWD = -100
_EXCHANGE = 2


def things(model: Any, optimizer: Any, scheduler: Any, extra: dict[str, Any]) -> Training:
    for name, value in extra.items():
        if hasattr(value, "state_dict"):
            raise UserError(
                f"{name} has a state of its own, and is none of model, optimizer and scheduler: misspelt? "
                f"If not, pass {name}.state_dict(), which is given back when it is loaded"
            )
    check_things(model, optimizer, scheduler)
    return Training(model, optimizer, scheduler, extra=extra)


@plainly
def save(
    framework: Framework, path: str | os.PathLike[str], training: Training, step: int, *, verify: str = "sample"
) -> str | None:
    """Write all of it to this folder, and return when it is on disk: its path. Ranks but 0 write nothing: None.

    An older one of the same name is there until the new one is whole, and was read back. Raises OSError, Damaged,
    UserError, or Refused for what could not be loaded again.
    """
    one_of("verify", verify, VERIFY)
    step = whole(step)
    path = path_of("a checkpoint's path", path)
    place = framework.group.place()
    if place is not None and place[0]:
        return None
    folder = Path(os.path.realpath(path))
    check_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    draft = _draft(folder, step)
    draft.path.mkdir()
    try:
        files = tuple(_write(framework, draft, *each) for each in states(framework, training, 0).items())
        world_size = place[1] if place is not None else 1
        manifest = Manifest(
            None, None, framework.name, framework.versions(), step, 0, world_size, _ALGORITHM, files, time.time()
        )
        draft.prepare(manifest)
        read_back(Checkpoint(draft.path, manifest), verify)
        _replace(draft.path, folder)
    except BaseException:
        draft.discard()
        raise
    return str(folder)


@plainly
def load(
    framework: Framework, path: str | os.PathLike[str], training: Training, *, trusted: bool = False
) -> dict[str, Any]:
    """Put a folder of ``save`` or of a Checkpointer, or a file of the framework's own, back into these things.

    What else was saved is in the dict that is returned: the step, and whatever was passed beside it. Raises Damaged,
    Refused, Misfit or UserError.
    """
    path = path_of("a checkpoint's path", path)
    place = there(path)
    kind = kind_of(place)
    if kind not in (None, PLAIN, FOLDER):
        raise UserError(f"{path} is {kind}, and no checkpoint: pass a folder or a file that was saved")
    if kind == PLAIN:
        state = load_file(framework, training, path, place, trusted=trusted)
        return {**values_of(state), "step": step_of(path, state)}
    checkpoint = look_in(Path(os.path.abspath(place)))
    restoring = Restoring(framework, training, trusted=trusted)
    rank = (framework.group.place() or (0, 1))[0]
    loaded = restoring.read(checkpoint, rank)
    restoring.apply(loaded, checkpoint.manifest.facts)
    facts = {name: value for name, value in checkpoint.manifest.facts.items() if name not in _OF_A_CHECKPOINTER}
    return {**facts, **(training.extra or {}), "step": checkpoint.manifest.step}


def _draft(folder: Path, step: int) -> Draft:
    name = temporary_name(f"{folder.name}.{secrets.token_hex(4)}", own_token())
    return Draft(folder.parent, step, 0, folder.parent / name)


def _sweep(folder: Path) -> None:
    """Remove drafts of this very folder that nobody finishes any more."""
    for name in os.listdir(folder.parent):
        path = folder.parent / name
        if _is_draft(name, folder) and not is_in_use(path, 0, own_token()):
            Draft(folder.parent, 0, 0, path).discard()


def _is_draft(name: str, folder: Path) -> bool:
    """Whether it was made for this very folder: those of best.2 begin like those of best."""
    begin = f".{folder.name}."
    is_ours = is_temporary(name) and name.startswith(begin)
    return is_ours and _OF_A_DRAFT.fullmatch(name.removeprefix(begin)) is not None


def _write(framework: Framework, draft: Draft, name: str, state: Any) -> FileEntry:
    skeleton, pieces = framework.skeleton(state)
    views, owners = framework.views(pieces)
    with draft.file(name) as output:
        written = WRITERS[framework.name](output, skeleton, views, algorithm=_ALGORITHM)
    del owners
    return entry_of(name, written)


def _replace(made: Path, place: Path) -> None:
    """Put a folder in the place of another one, in one step where the file system can."""
    if not place.exists():
        os.rename(made, place)
        Draft(made.parent, 0, 0, _old(place)).discard()
    elif _exchanged(made, place):
        Draft(made.parent, 0, 0, made).discard()
    else:
        old = _old(place)
        Draft(made.parent, 0, 0, old).discard()
        os.rename(place, old)
        os.rename(made, place)
        Draft(made.parent, 0, 0, old).discard()
    sync_folder(place.parent)


def _exchanged(one: Path, other: Path) -> bool:
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    return not renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE)


def _old(place: Path) -> Path:
    return place.with_name(temporary_name(place.name, OLD))


def there(path: str) -> str:
    """Where that lies which is to be loaded from a path: whoever was about to replace it may have been killed then."""
    place = Path(os.path.realpath(path))
    return path if os.path.lexists(place) or not os.path.lexists(_old(place)) else str(_old(place))


def look_in(folder: Path) -> Checkpoint:
    """The checkpoint that a folder is, whatever it is called. Raises Damaged or UserError."""
    try:
        return Checkpoint(folder, read_manifest(folder))
    except BadManifest as error:
        raise Damaged(str(folder), str(error)) from None
    except (FileNotFoundError, NotADirectoryError):
        why = f"is no checkpoint: it has no {MANIFEST}" if folder.exists() else "is not there"
        raise UserError(f"{folder} {why}; pass a folder or a file that was saved") from None
