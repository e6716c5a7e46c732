"""Puts a checkpoint back into the user's things: all that is read is checked on the way, then all is applied.

A model's tensors are read into directly. Who gets Damaged has a model that holds anything, and must fill it from
another checkpoint, or end.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_adapter.core.checkpoint.contents import Training, set_random_states, several
from elastic_adapter.core.checkpoint.files import Damaged, Expected, Misfit, Refused
from elastic_adapter.core.checkpoint.framework import Framework
from elastic_adapter.core.checkpoint.garbage import uncollected
from elastic_adapter.core.checkpoint.hashing import Reader, verify_file
from elastic_adapter.core.checkpoint.manifest import (
    MANIFEST,
    BadManifest,
    FileEntry,
    Manifest,
    manifest_from_bytes,
    parse_folder,
)
from elastic_adapter.core.checkpoint.policy import shown, whole
from elastic_adapter.core.checkpoint.saving import numbered
from elastic_adapter.core.checkpoint.store import Checkpoint, is_gone, is_unread
from elastic_adapter.core.errors import UserError, in_one_line

log = logging.getLogger(__name__)

# What data parallelism and torch.compile put before the names of a model.
_WRAPPERS = ("module.", "_orig_mod.")
# So many names are told where many are wrong.
_MOST_NAMED = 3


@dataclass(slots=True)
class Loaded:
    """What was read, and is not applied yet; None: the checkpoint has none of it, or nobody wants it."""

    where: str
    # States of models that can't be read into directly, by the beginnings of their names.
    models: dict[str, Any] = field(default_factory=dict)
    # What is no tensor in the states of those that were.
    rests: dict[str, Any] = field(default_factory=dict)
    optimizer: Any = None
    extra: Any = None
    own: Any = None
    renamed: dict[str, str] = field(default_factory=dict)


class Restoring:
    """One way of loading: into these things, by this framework."""

    def __init__(self, framework: Framework, training: Training, *, trusted: bool = False) -> None:
        self._framework = framework
        self._training = training
        self._trusted = trusted

    def read(self, checkpoint: Checkpoint, rank: int) -> Loaded:
        """Everything that this rank needs, checked. Raises Damaged, OSError, Misfit, Refused or UserError."""
        framework, training, manifest = self._framework, self._training, checkpoint.manifest
        where = str(checkpoint.path)
        if manifest.framework != framework.name:
            raise UserError(f"{where} was saved with {manifest.framework}, and this is {framework.name}")
        wanted = self._wanted(rank)
        files = {file.name: file for file in manifest.files if file.name in wanted}
        loaded = Loaded(where)
        if training.model is not None:
            if framework.model_file not in files:
                raise UserError(f"{where} holds no {framework.model_file}, and a model is to be restored")
            self._fill(checkpoint, files[framework.model_file], loaded)
        if entry := files.get(framework.optimizer_file):
            loaded.optimizer = self._read(checkpoint, entry)
            if training.model is not None:
                loaded.renamed = self._renamed(str(checkpoint.path / framework.model_file))
        if entry := files.get(framework.extra_file):
            loaded.extra = self._read(checkpoint, entry)
        if entry := files.get(framework.rank_file(rank)):
            loaded.own = self._read(checkpoint, entry)
        return loaded

    def check_others(self, checkpoint: Checkpoint, rank: int) -> None:
        """The files that ``read`` does not read here, and so does not check: the others', and what nobody wants now."""
        wanted = self._wanted(rank)
        for file in checkpoint.manifest.files:
            if file.name not in wanted:
                verify_file(str(checkpoint.path / file.name), _expected(checkpoint, file), stored=False)

    def _wanted(self, rank: int) -> set[str]:
        """The names of the files that this rank reads, where a checkpoint has them."""
        framework, training = self._framework, self._training
        wanted = {
            framework.model_file: training.model is not None,
            framework.optimizer_file: training.optimizer is not None,
            framework.extra_file: training.scheduler is not None or training.extra is not None,
            framework.rank_file(rank): training.rng,
        }
        return {name for name, is_wanted in wanted.items() if is_wanted}

    def _renamed(self, path: str) -> dict[str, str]:
        try:
            return self._framework.renamed(path, several(self._training.model))
        except Refused:
            if not self._trusted:
                raise
            # The framework's own loader does not tell what things were called.
            return {}

    def apply(self, loaded: Loaded, facts: Mapping[str, Any]) -> None:
        """Raises UserError where what was saved does not fit to what there is."""
        framework, training = self._framework, self._training
        for name, state in loaded.models.items():
            framework.set_model(several(training.model)[name], state)
        for name, state in loaded.rests.items():
            framework.set_rest(several(training.model)[name], state)
        self._apply_optimizer(loaded)
        others = loaded.extra or {}
        _apply_state(framework, loaded.where, "scheduler", training.scheduler, others)
        _apply_extra(framework, loaded.where, training.extra, others)
        self._apply_sampler(loaded.where, facts.get("sampler"))
        kept = loaded.own.get("rng") if isinstance(loaded.own, Mapping) else loaded.own
        if kept is not None:
            try:
                set_random_states(framework, kept)
            except ValueError as error:
                log.warning("%s: the random generators are not restored: %s", loaded.where, error)

    def _apply_optimizer(self, loaded: Loaded) -> None:
        optimizer = self._training.optimizer
        if optimizer is None:
            return
        if loaded.optimizer is None:
            log.warning("%s holds no state of the optimizer (save_optimizer=False): it begins anew", loaded.where)
            return
        found = loaded.optimizer if isinstance(optimizer, Mapping) else {"": loaded.optimizer}
        wanted = optimizer if isinstance(optimizer, Mapping) else {"": optimizer}
        _same_names(f"{loaded.where}/{self._framework.optimizer_file}", "optimizer", found, wanted)
        for name, each in wanted.items():
            try:
                self._framework.set_optimizer(each, found[name], loaded.renamed)
            except UserError as error:
                raise UserError(f"{loaded.where}: {error}") from None

    def _apply_sampler(self, where: str, state: Any) -> None:
        sampler = self._training.sampler
        if sampler is None or not hasattr(sampler, "load_state_dict"):
            return
        if state is None:
            log.warning("%s holds no state of a sampler: it begins with the first sample", where)
            return
        try:
            sampler.load_state_dict(state)
        except ValueError as error:
            raise UserError(f"{where}: {error}") from None

    def _fill(self, checkpoint: Checkpoint, file: FileEntry, loaded: Loaded) -> None:
        """Read into all models that allow it; what the others load, and what is no tensor, is still to be applied."""
        models = several(self._training.model)
        targets = {begin: self._framework.targets(model) for begin, model in models.items()}
        into = {f"{begin}{name}": each for begin, found in targets.items() for name, each in (found or {}).items()}
        path = str(checkpoint.path / file.name)
        self._check_tensors(path, file, targets)
        by_model = _by_model(path, self._read(checkpoint, file, into), models)
        for begin in models:
            found, state = targets[begin], by_model[begin]
            # All of it is to be applied, where some of it is not in its place: a name was not clear, or the framework's
            # own loader has read the file.
            if found is None or any(state.get(name) is not each for name, each in found.items()):
                loaded.models[begin] = state
            elif rest := {name: value for name, value in state.items() if name not in found}:
                loaded.rests[begin] = rest

    def _check_tensors(self, path: str, file: FileEntry, targets: Mapping[str, dict[str, Any] | None]) -> None:
        """The file's tensors are those that are to be filled, by their names. Raises UserError.

        But not those of a model that loads its state itself, nor what lies within a value that is no tensor.
        """
        wanted = numbered(f"{begin}{name}" for begin, found in targets.items() for name in found or ())
        others: list[str] = []
        for begin, model in several(self._training.model).items():
            if (found := targets[begin]) is None:
                others.append(begin)
            else:
                others += [f"{begin}{name}/" for name in self._framework.model_state(model) if name not in found]
        known, begins = set(wanted), tuple(others)
        names = [each.name for each in file.tensors if each.name in known or not each.name.startswith(begins)]
        _same_names(path, "tensor", names, wanted)

    def _read(self, checkpoint: Checkpoint, file: FileEntry, into: Mapping[str, Any] | None = None) -> Any:
        path, expected = str(checkpoint.path / file.name), _expected(checkpoint, file)
        try:
            with uncollected():
                return self._framework.read(path, into, expected)
        except (Refused, Misfit) as error:
            # That is said of what was written only if this is what was written.
            verify_file(path, expected, stored=False)
            if isinstance(error, Misfit) or not self._trusted:
                raise
            return self._framework.read_trusting(path)


def is_damaged_in_storage(path: Path, error: Damaged | OSError) -> bool:
    """Whether what was wrong with a checkpoint is wrong where it is stored as well, past the page cache.

    It is read once more for that: what belongs to the error, and its manifest. What is gone by now is not damaged.
    """
    name = os.path.basename(error.path if isinstance(error, Damaged) else error.filename or "")
    try:
        checkpoint = Checkpoint(path, _stored_manifest(path))
        for file in checkpoint.manifest.files:
            if file.name == name:
                verify_file(str(path / name), _expected(checkpoint, file), stored=True)
    except (Damaged, BadManifest):
        return True
    except OSError as again:
        return not is_unread(again) and not is_gone(path)
    return False


def _stored_manifest(path: Path) -> Manifest:
    """Raises BadManifest, Damaged or OSError."""
    with closing(Reader(str(path / MANIFEST), stored=True)) as reader:
        manifest = manifest_from_bytes(b"".join(map(bytes, reader.chunks(0, reader.size))))
    if parse_folder(path.name) != (manifest.step, manifest.generation):
        raise BadManifest(f"it is of step {manifest.step}, generation {manifest.generation}")
    return manifest


def load_foreign(framework: Framework, training: Training, path: str, place: str, *, trusted: bool) -> int:
    """Load a file that somebody else has saved; its step, if it has one."""
    return step_of(path, load_file(framework, training, path, place, trusted=trusted))


def step_of(path: str, state: Mapping[str, Any]) -> int:
    """The step that a file of somebody else's names, if it does. Weights may be called so as well, and are no step."""
    step: Any = state.get("step")
    shape = getattr(step, "shape", ())
    if step is None or (isinstance(shape, list | tuple) and len(shape)):
        return 0
    try:
        return whole(step)
    except UserError:
        log.warning("%s: its step is %s, which is no number of steps: it counts as 0", path, shown(step))
        return 0


def load_file(framework: Framework, training: Training, path: str, place: str, *, trusted: bool) -> Any:
    """The state of a file that somebody else has saved, put into the user's things.

    The path says what it is; it lies at this place.
    """
    if not os.path.isfile(place):
        raise UserError(f"{path} is no file that was saved by {framework.name}, and no folder of a checkpoint")
    state = framework.read_trusting(place) if trusted else framework.read(place)
    try:
        _apply_foreign(framework, training, path, state)
    except UserError as error:
        raise UserError(f"{path}: {error}" if path not in str(error) else str(error)) from None
    return state


def values_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a file holds beside states: its step, and what else people note. Of weights alone, no tensors."""
    used = {kind: [key for key in keys if isinstance(state.get(key), Mapping)] for kind, keys in _FOREIGN.items()}
    if used["model"]:
        return {name: value for name, value in state.items() if all(name not in keys for keys in used.values())}
    return {name: value for name, value in state.items() if isinstance(value, int | float | str | bool)}


def _apply_foreign(framework: Framework, training: Training, path: str, state: Any) -> None:
    """Weights, or a dict of several states."""
    if not isinstance(state, Mapping):
        raise UserError(f"{path} holds no dict of weights, but a value of the type {type(state).__name__}")
    found = {name: _under(state, *keys) for name, keys in _FOREIGN.items()}
    if path.endswith(".pdopt"):
        if training.optimizer is None:
            raise UserError(f"{path} holds the state of an optimizer: pass that as optimizer=")
        found = {**dict.fromkeys(_FOREIGN), "optimizer": state}
    elif found["model"] is None:
        if training.model is None or isinstance(training.model, Mapping):
            raise UserError(f"{path} holds weights of one model: pass that as model=")
        found["model"] = state
    # All that is missing is known before anything is changed.
    models = _of_each(path, "model", training.model, found["model"])
    optimizers = _of_each(path, "optimizer", training.optimizer, found["optimizer"])
    for model, weights in models:
        framework.set_model(model, _unwrapped(weights, framework.model_state(model)))
    for optimizer, kept in optimizers:
        framework.set_optimizer(optimizer, kept, {})
    if training.scheduler is not None and found["scheduler"] is not None:
        _apply_state(framework, path, "scheduler", training.scheduler, found)


def _of_each(path: str, what: str, thing: Any, state: Mapping[str, Any] | None) -> list[tuple[Any, Mapping[str, Any]]]:
    """The user's things of one kind, each with its state. Raises UserError where one has none."""
    if thing is None or state is None:
        return []
    if not isinstance(thing, Mapping):
        return [(thing, state)]
    if missing := [name for name in thing if name not in state]:
        raise UserError(f"{path} does not fit: it has no {what} {_some(missing)}")
    for name in thing:
        if not isinstance(state[name], Mapping):
            kind = type(state[name]).__name__
            raise UserError(f"{path} does not fit: its {what} {name!r} is no dict, but a value of the type {kind}")
    return [(each, state[name]) for name, each in thing.items()]


# How people call what they save together.
_FOREIGN = {
    "model": ("model", "state_dict", "model_state_dict", "model_state", "net"),
    "optimizer": ("optimizer", "optimizer_state_dict", "optimizer_state", "opt", "optim"),
    "scheduler": ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict"),
}


def _under(state: Mapping[str, Any], *keys: str) -> Any:
    return next((state[key] for key in keys if isinstance(state.get(key), Mapping)), None)


def _unwrapped(weights: Mapping[str, Any], here: Collection[str]) -> Mapping[str, Any]:
    """Names without what wrappers put before them, one within the other, unless the model's own begin so."""
    names = [name for name in weights if isinstance(name, str) and name not in here]
    for begin in _WRAPPERS:
        if weights and len(names) == len(weights) and all(name.startswith(begin) for name in names):
            return _unwrapped({name.removeprefix(begin): value for name, value in weights.items()}, here)
    return weights


def _by_model(path: str, state: Any, models: Collection[str]) -> dict[str, Mapping[str, Any]]:
    """A file's state, by what the names of each model begin with. Raises UserError where it is of other models."""
    found = {"": state}
    if "" not in models and isinstance(state, Mapping):
        found = {f"{name}/": each for name, each in state.items()}
        _same_names(path, "model", found, models)
    for each in found.values():
        if not isinstance(each, Mapping):
            raise UserError(f"{path} holds no dict of weights, but a value of the type {type(each).__name__}")
    return found


def _expected(checkpoint: Checkpoint, file: FileEntry) -> Expected:
    return Expected(file.size, file.hash, checkpoint.manifest.algorithm)


def _apply_extra(framework: Framework, where: str, extra: Any, others: Mapping[str, Any]) -> None:
    if not isinstance(extra, Mapping):
        _apply_state(framework, where, "extra", extra, others)
        return
    found = others.get("extra")
    if found is None:
        # In an empty one, as load_checkpoint has it, nobody misses anything.
        if extra:
            log.warning("%s holds no extra: it stays as it is", where)
        return
    for name, value in found.items():
        if hasattr(extra.get(name), "state_dict"):
            _apply_state(framework, where, name, extra[name], found)
        else:
            extra[name] = value  # type: ignore[index]


def _apply_state(framework: Framework, where: str, name: str, thing: Any, found: Mapping[str, Any]) -> None:
    if thing is None:
        return
    if found.get(name) is None:
        log.warning("%s holds no state of the %s: it begins anew", where, name)
        return
    if isinstance(thing, Mapping):
        for each, one in thing.items():
            _apply_state(framework, where, each, one, found[name])
        return
    load = getattr(thing, "load_state_dict", None) or thing.set_state_dict
    try:
        framework.check(thing, found[name])
        load(found[name])
    except UserError as error:
        raise UserError(f"{where}: the state of the {name} does not fit: {error}") from None
    except (ValueError, LookupError, RuntimeError, AssertionError, TypeError, AttributeError) as error:
        raise UserError(f"{where}: the state of the {name} does not fit: {in_one_line(error)}") from error


def _same_names(path: str, what: str, found: Collection[str], wanted: Collection[str]) -> None:
    words = []
    found, wanted = dict.fromkeys(found), dict.fromkeys(wanted)
    if missing := [name for name in wanted if name not in found]:
        words.append(f"it has no {what} {_some(missing)}")
    if unknown := [name for name in found if name not in wanted]:
        words.append(f"the training has no {what} {_some(unknown)}, which it has")
    if words:
        raise UserError(f"{path} does not fit: {'; '.join(words)}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(map(repr, names[:_MOST_NAMED])) + more
