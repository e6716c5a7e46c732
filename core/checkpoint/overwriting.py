"""What one checkpoint may take the place of: an older one, a file of weights, or nothing. All else stays."""

from __future__ import annotations

import os
import re
from pathlib import Path

from elastic_adapter.core.checkpoint.archive import first_name
from elastic_adapter.core.checkpoint.files import FOLDER, PLAIN, Damaged, Refused, kind_of, open_plain
from elastic_adapter.core.checkpoint.manifest import FORMAT, MANIFEST, MD5_SUMS, BadManifest
from elastic_adapter.core.checkpoint.paddlefile import TensorRef, read_paddle
from elastic_adapter.core.checkpoint.store import read_manifest
from elastic_adapter.core.checkpoint.trees import leaves
from elastic_adapter.core.errors import UserError

# How our manifests begin, whatever has become of their ends.
_BEGIN = f'{{"format":{FORMAT},"job":'.encode()
# The files that checkpoints are made of, where the manifest does not say it any more.
_USUAL = re.compile(r"(model|optimizer|extra|rank-[0-9]{5,})\.(pt|pdparams|pdopt)")
# The protocols of pickle that say so in a file's second byte.
_PICKLES = (b"\x02", b"\x03", b"\x04", b"\x05")


def check_replaceable(path: Path) -> None:
    """Raises UserError where a save to this path would take something away that is no older save."""
    kind = kind_of(str(path))
    if kind == FOLDER:
        _check_folder(path)
    elif kind == PLAIN and not _was_saved(path):
        raise UserError(f"{path} is a file that no framework saved, and a save would replace it: name another path")
    elif kind not in (None, PLAIN):
        raise UserError(f"{path} is {kind}, which no checkpoint can replace: name another path")


def _check_folder(folder: Path) -> None:
    names = sorted(os.listdir(folder))
    if names and MANIFEST not in names:
        raise UserError(f"{folder} is a folder with other things in it, which a save would replace: name another one")
    known = {MANIFEST, MD5_SUMS, *_data(folder, names)} if names else set()
    for name in names:
        if name not in known or _is_folder(folder / name):
            raise UserError(
                f"{folder / name} is no part of the checkpoint in that folder, and would be deleted with it: "
                "move it away, or name another folder"
            )


def _data(folder: Path, names: list[str]) -> set[str]:
    """The files of the checkpoint that a folder is. One that is damaged may be replaced, if it is one of ours."""
    try:
        return {file.name for file in read_manifest(folder).files}
    except (BadManifest, OSError) as error:
        if _begins_like_ours(folder / MANIFEST):
            return set(filter(_USUAL.fullmatch, names))
        raise UserError(
            f"{folder} has a {MANIFEST} that is no checkpoint's ({error}), and a save would replace all of it: "
            "name another folder, or delete it if nobody needs it"
        ) from None


def _begins_like_ours(manifest: Path) -> bool:
    try:
        with open(open_plain(str(manifest)), "rb") as file:
            return file.read(len(_BEGIN)) == _BEGIN
    except (Damaged, OSError):
        return False


def _is_folder(path: Path) -> bool:
    """Of a link, only the link would be deleted."""
    return path.is_dir() and not path.is_symlink()


def _was_saved(file: Path) -> bool:
    """Whether it is a file of weights, as torch.save (since 1.6) and paddle.save write them; or is empty."""
    with open(file, "rb") as opened:
        if (name := first_name(opened)) is not None:
            return name.endswith(b"/data.pkl")
        opened.seek(0)
        begin = opened.read(2)
    return begin == b"" or (begin[:1] == b"\x80" and begin[1:] in _PICKLES and _holds_tensors(str(file)))


def _holds_tensors(path: str) -> bool:
    """Whether a pickle is one of paddle.save, which notes what tensors are called. Other arrays are data of somebody's.

    Nothing of it is run, and no long array is read.
    """
    try:
        return any(tensor.name for _, tensor in leaves(path, read_paddle(path).state, TensorRef))
    except (Damaged, Refused):
        return False
