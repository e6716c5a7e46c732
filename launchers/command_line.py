"""The words of the command line: which are options, where the script begins, and the help text.

Options end at the script; what follows is the script's own and is never looked at. (argparse would: on some Python
versions it refuses a script's option that could abbreviate two of the launcher's.) It still lays out the help.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from elastic_adapter.core.errors import UserError
from elastic_adapter.launchers.settings import GROUPS, SETTINGS, Setting

# Spelt with dashes.
_FLAGS: dict[str, Setting] = {flag.replace("_", "-"): setting for setting in SETTINGS for flag in setting.flags}

_NEGATIVE_NUMBER = re.compile(r"-\d+(\.\d*)?$|-\.\d+$")

_USAGE = """elastic-launch [options] script [arguments of the script]
       elastic-launch status|events --job NAME --rdzv-endpoint HOST:PORT [--json]
       elastic-launch clear --job NAME --rdzv-endpoint HOST:PORT NODE
       elastic-launch checkpoints list|verify [FOLDER] [--json]"""

_DESCRIPTION = """\
Runs a training script on several workers and starts them again when one fails.

Options are accepted with dashes or underscores, and may be shortened where that is
unambiguous. Each can also be set by a variable: ELASTIC_NPROC_PER_NODE=2, or
PET_NPROC_PER_NODE=2 where torchrun has the same option (switches: 0 or 1). The options
of the group paddle are those of Paddle's launchers, for --framework paddle only; so are
their variables (PADDLE_NNODES=2), which win over the options there.
"""

_EPILOG = """\
examples:
  elastic-launch --nproc-per-node 2 train.py --lr 0.1
      two workers on this machine; what follows train.py belongs to it
  elastic-launch --framework torch --nproc-per-node gpu --max-restarts 3 train.py
      a worker per GPU; after a failure all start again, three times at most
  elastic-launch --framework torch --nproc-per-node 2 -m package.train
      a module instead of a script
  elastic-launch --framework plain --nproc-per-node 4 ./simulate --steps 100
      any program; it finds its place in ELASTIC_RANK and ELASTIC_WORLD_SIZE
  elastic-launch --framework paddle --nnodes 2:4 --master etcd://etcd1:2379 --job_id j train.py
      two to four nodes, in the words of Paddle's launchers
  elastic-launch status --job job1 --rdzv-endpoint etcd1:2379
      who takes part in a job of several nodes, and how it is; events: what happened to it;
      clear: nothing is held against the node named last any more
  elastic-launch checkpoints list /data/run7
      which checkpoints are in a folder; verify: whether all their bytes are as they were written
  elastic-launch --dry-run --nproc-per-node 2 train.py
      show the settings, where each comes from, and each worker's environment
"""


@dataclass(frozen=True, slots=True)
class CommandLine:
    # By the setting's name; a switch that was given is "1".
    options: dict[str, str] = field(default_factory=dict)
    # The script and its arguments.
    words: tuple[str, ...] = ()


def parse(argv: Sequence[str]) -> CommandLine:
    options: dict[str, str] = {}
    at = 0
    while at < len(argv):
        word = argv[at]
        if word == "--":
            return CommandLine(options, tuple(argv[at + 1 :]))
        if not word.startswith("-") or word == "-":
            break
        flag, value = _split(word)
        at += 1
        if value is None and not _FLAGS[flag].switch:
            value = _following(flag, argv, at)
            at += 1
        _add(options, flag, value)
    return CommandLine(options, tuple(argv[at:]))


def _split(word: str) -> tuple[str, str | None]:
    """The flag that a word names, spelt in full, and the value that is attached to it."""
    name, equals, value = word.partition("=")
    short = _FLAGS.get(name[:2])
    if name[2:] and short is not None and not short.switch:
        return name[:2], word[2:]
    return _full(name), value if equals else None


def _full(name: str) -> str:
    wanted = name.replace("_", "-")
    if wanted in _FLAGS:
        return wanted
    candidates = [flag for flag in _FLAGS if wanted.startswith("--") and flag.startswith(wanted)]
    # What torchrun's users shorten must not become ambiguous by our words or Paddle's.
    theirs = [flag for flag in candidates if any(name.startswith("PET_") for name in _FLAGS[flag].variables)]
    candidates = theirs or [flag for flag in candidates if _FLAGS[flag].group != "paddle"] or candidates
    if len({_FLAGS[flag].name for flag in candidates}) > 1:
        raise UserError(f"{name} could mean {', '.join(sorted(candidates))}: write it in full")
    if not candidates:
        raise UserError(f"unknown option {name}{_guess(wanted)}; elastic-launch --help lists the options")
    return candidates[0]


def _guess(name: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, _FLAGS, n=1)
    return f": did you mean {close[0]}?" if close else ""


def _following(flag: str, argv: Sequence[str], at: int) -> str:
    metavar = _FLAGS[flag].metavar
    if at == len(argv):
        raise UserError(f"{flag}: expected a value ({metavar}), got nothing")
    value = argv[at]
    if value.startswith("-") and value != "-" and not _NEGATIVE_NUMBER.match(value):
        raise UserError(
            f"{flag}: expected a value ({metavar}), got {value!r}; if it is the value, write {flag}={value}"
        )
    return value


def _add(options: dict[str, str], flag: str, value: str | None) -> None:
    setting = _FLAGS[flag]
    if setting.switch:
        if value is not None:
            raise UserError(f"{flag} is a switch: expected no value, got {value!r}")
        value = "1"
    assert value is not None
    before = options.get(setting.name)
    options[setting.name] = f"{before},{value}" if setting.repeats and before else value


def help_text() -> str:
    from argparse import ArgumentParser, RawDescriptionHelpFormatter

    parser = ArgumentParser(
        "elastic-launch",
        usage=_USAGE,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
        add_help=False,
    )
    for title in GROUPS:
        group = parser.add_argument_group(title)
        for setting in SETTINGS:
            if setting.group != title or not setting.flags:
                continue
            if setting.switch:
                group.add_argument(*setting.flags, action="store_true", help=setting.help)
            else:
                group.add_argument(*setting.flags, metavar=setting.metavar, help=_with_default(setting))
    return parser.format_help()


def _with_default(setting: Setting) -> str:
    text = f"{setting.help} (default: {setting.default.strip()})" if setting.default else setting.help
    return text.replace("%", "%%")
