"""Paddle's words in ours: the flags and variables of paddle.distributed.launch, of fleetrun and of PaddleCloud's pods.

Pure translation: settings in, the same settings out, each with the origin that the user wrote. As in Paddle, its
variables win over the flags. What they come to is checked where our own settings are, in ``resolve``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from elastic_adapter.core.errors import UserError
from elastic_adapter.launchers import rendezvous
from elastic_adapter.launchers.devices import Machine, gpu_count
from elastic_adapter.launchers.settings import SETTINGS, Given
from elastic_adapter.launchers.settings import WORKER_VARIABLES as OWN_WORKER_VARIABLES

_ROWS = {setting.name: setting for setting in SETTINGS}
_ONLY_PADDLE = tuple(setting.name for setting in SETTINGS if setting.group == "paddle")

_PARAMETER_SERVER = ("servers", "trainers", "server_num", "trainer_num", "gloo_port", "with_gloo")
_TOOLS = ("auto_tuner_json", "auto_parallel_config", "elastic_pre_hook")
_IDLE = ("sort_ip", "legacy", "enable_gpu_log", "auto_cluster_config", "scale", "force")
_KINDS = {"gpus": "gpu", "npus": "npu", "xpus": "xpu"}
_NAMES = {"gpu": "GPU", "npu": "NPU", "xpu": "XPU"}

# What PaddleCloud, its operator and Kubernetes tell a pod; there are no flags for these.
_SERVICE = ("PADDLE_ELASTIC_ETCD_SERVICE_HOST", "PADDLE_ELASTIC_ETCD_SERVICE_PORT")
_CLOUD = (
    *("PADDLE_TRAINERS", "PADDLE_TRAINERS_NUM", "PADDLE_PORT", "TRAINER_PORTS_NUM"),
    *("PADDLE_TRAINER_ENDPOINTS", "DISTRIBUTED_TRAINER_ENDPOINTS"),
)

# Those by which a command without --framework is known to be meant for Paddle.
_TELLING = frozenset(
    {
        *_SERVICE,
        *_CLOUD,
        *(
            variable
            for setting in SETTINGS
            if setting.name not in (*_PARAMETER_SERVER, *_TOOLS)
            for variable in setting.paddle
            if variable.startswith("PADDLE_")
        ),
    }
)

# A worker's environment holds these (see adapters.paddlepaddle.launch, and Paddle's own launcher): in a launcher that
# a worker starts they are no settings.
WORKER_VARIABLES = frozenset(
    {
        *("PADDLE_MASTER", "PADDLE_NNODES", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_CURRENT_ENDPOINT"),
        *("PADDLE_GLOBAL_RANK", "PADDLE_GLOBAL_SIZE", "PADDLE_LOCAL_RANK", "PADDLE_LOCAL_SIZE", "PADDLE_RANK_IN_NODE"),
        *("PADDLE_TRAINER_ENDPOINTS", "PADDLE_AUTO_CLUSTER", "PADDLE_LOG_DIR", "PADDLE_DISTRI_BACKEND"),
    }
)

_ETCD = "etcd://"
_IPS_PORT = "6070"
_CLOUD_PORT = "6170"
_TRUE, _FALSE = ("1", "true", "t", "yes", "y", "on"), ("0", "false", "f", "no", "n", "off")
_USER = re.compile(r"[^/,\s]*@")


@dataclass(frozen=True, slots=True)
class Translated:
    values: Mapping[str, Given]
    # The chosen devices as numbers among the visible ones; none: not chosen.
    devices: tuple[str, ...] = ()
    device_kind: str = "gpu"
    # Whether log files of earlier runs are begun anew.
    overwrite: bool = False
    notes: tuple[str, ...] = ()


def set_variables(environ: Mapping[str, str]) -> list[str]:
    """The variables of Paddle's launchers that are set and tell that the command is meant for Paddle."""
    return sorted(name for name, value in _settings_of(environ).items() if name in _TELLING and value)


def foreign(values: Mapping[str, Given], framework: str, found_by: str) -> Translated:
    """The settings for another framework, for which Paddle's flags are a mistake, but --np is torchrun's short form."""
    for name in _ONLY_PADDLE:
        given = values[name]
        if given.explicit and name != "np":
            raise UserError(
                f"{given.where} {given.text} is for --framework paddle, got {framework} ({found_by}): "
                "leave it out, or add --framework paddle"
            )
    made, short, full = dict(values), values["np"], values["nproc-per-node"]
    if not short.explicit:
        return Translated(made)
    if full.origin.startswith("flag") and full.text != short.text:
        raise UserError(f"{short.where} {short.text} and {full.where} {full.text} contradict each other: leave out one")
    made["nproc-per-node"] = Given("nproc-per-node", short.text, short.origin)
    return Translated(made)


def translate(values: Mapping[str, Given], environ: Mapping[str, str], machine: Machine) -> Translated:
    """What a command for Paddle means in our settings."""
    work = _Translation(dict(values), _settings_of(environ), machine)
    work.refuse_modes()
    for target, rows in _SAME:
        work.settle(target, rows)
    work.count_nodes()
    work.meet()
    work.address()
    work.level()
    devices, kind = work.choose_devices()
    work.count_workers(devices)
    overwrite = work.flag_of("log_overwrite")
    if overwrite is not None and not work.values["log-dir"].text:
        work.idle.append(work.values["log_overwrite"].where)
    work.idle += [work.values[name].where for name in _IDLE if work.settle(name).explicit]
    if work.idle:
        work.notes.append(f"no effect: {', '.join(dict.fromkeys(work.idle))}")
    return Translated(work.values, devices, kind, bool(overwrite), tuple(work.notes))


def check_devices(translated: Translated, slots: int) -> None:
    """Several workers need a device each; one may have many."""
    given, count = translated.values["devices"], translated.values["nproc-per-node"]
    if translated.devices and 1 < slots > len(translated.devices):
        raise UserError(
            f"{count.where} {count.text}: {slots} workers need a device each, but {given.where} {given.text} names "
            f"{len(translated.devices)}: name more, or start fewer workers"
        )


# Our settings that have the same meaning in Paddle's words.
_SAME: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("rdzv-id", ()),
    ("nnodes", ("np",)),
    ("nproc-per-node", ()),
    ("max-restarts", ("max_restart",)),
    ("quiet-time", ("elastic_timeout",)),
    ("lease-ttl", ()),
    ("log-dir", ()),
    ("log-level", ("log_level",)),
)


@dataclass(frozen=True, slots=True)
class _Said:
    """A flag or variable as the user wrote it, and what that means in our words."""

    origin: str
    written: str
    means: str

    @property
    def is_flag(self) -> bool:
        return self.origin.startswith("flag")

    @property
    def where(self) -> str:
        return self.origin.partition(" ")[2]

    def __str__(self) -> str:
        text = _USER.sub("***@", self.written)
        return f"{self.where} {text}" if self.is_flag else f"{self.where}={text!r}"


def _as_said(given: Given) -> _Said:
    return _Said(given.origin, given.text or "", "")


@dataclass(slots=True)
class _Translation:
    """The settings under way from Paddle's words to ours."""

    values: dict[str, Given]
    environ: Mapping[str, str]
    machine: Machine
    notes: list[str] = field(default_factory=list)
    # Flags and variables without effect.
    idle: list[str] = field(default_factory=list)

    def variable(self, *names: str) -> Given:
        """The first of these that is set."""
        found = next((name for name in names if self.environ.get(name)), None)
        return Given(names[0], None) if found is None else Given(found, self.environ[found], f"variable {found}")

    def said(self, rows: Iterable[str], means: Callable[[Given], str] | None = None) -> list[_Said]:
        """What Paddle's variables and the flags of these rows say, the variables first."""
        names = tuple(rows)
        told = [self.variable(variable) for name in names for variable in _ROWS[name].paddle]
        told += [self.values[name] for name in names if self.values[name].origin.startswith("flag")]
        read = means or (lambda given: (given.text or "").strip())
        return [_Said(given.origin, given.text or "", read(given)) for given in told if given.text is not None]

    def settle(self, target: str, rows: tuple[str, ...] = ()) -> Given:
        return self.agree(target, self.said((target, *rows)))

    def agree(self, target: str, said: list[_Said]) -> Given:
        """The setting's value by Paddle's variables, else by a flag, else as it was."""
        variables, flags = [each for each in said if not each.is_flag], [each for each in said if each.is_flag]
        if variables:
            _one_meaning(target, [*self._own_variables(target), *variables])
        _one_meaning(target, flags)
        if said:
            chosen = (variables or flags)[0]
            for each in flags:
                if _key(target, each) != _key(target, chosen):
                    self.notes.append(f"{chosen} wins over {each}, as in Paddle")
            self.values[target] = Given(target, chosen.means, chosen.origin)
        return self.values[target]

    def _own_variables(self, target: str) -> list[_Said]:
        names = [name for name in _ROWS[target].variables if name.startswith(("ELASTIC_", "PET_"))]
        texts = {name: self.environ.get(name, "") for name in names}
        return [_Said(f"variable {name}", text, text.strip()) for name, text in texts.items() if text]

    def flag_of(self, name: str) -> bool | None:
        given = self.settle(name)
        if given.text is None:
            return None
        if given.text.lower() not in (*_TRUE, *_FALSE):
            raise given.wrong("true or false")
        return given.text.lower() in _TRUE

    def refuse_modes(self) -> None:
        """What needs Paddle's own launcher."""
        mode, role = self.settle("run_mode"), self.variable("TRAINING_ROLE")
        refused = [said for name in (*_PARAMETER_SERVER, *_TOOLS) for said in map(str, self.said((name,)))]
        if mode.text is not None and mode.text.lower() != "collective":
            refused.insert(0, str(self.said(("run_mode",))[0]))
        if (role.text or "").upper() == "PSERVER":
            refused.append(str(_as_said(role)))
        if refused:
            raise UserError(
                f"{refused[0]}: not supported here, where jobs are collective; leave it out, or use "
                "python -m paddle.distributed.launch"
            )

    def _addresses(self) -> Given:
        """--ips, or the hosts of a list of all workers' endpoints, as clouds give it."""
        ips = self.settle("ips")
        endpoints = self.variable("PADDLE_TRAINER_ENDPOINTS", "DISTRIBUTED_TRAINER_ENDPOINTS")
        spots = [rendezvous.parsed(item) for item in endpoints.items()]
        hosts = list(dict.fromkeys(spot.host for spot in spots if spot is not None))
        told = ips.explicit or self.values["nnodes"].explicit or self.variable("PADDLE_TRAINERS").text is not None
        if told or len(hosts) <= 1:
            return ips
        if None in spots or len(spots) % len(hosts):
            raise endpoints.wrong("a list of HOST:PORT, as many for each host")
        self.values["ips"] = Given("ips", ",".join(hosts), endpoints.origin)
        if not self.values["start_port"].explicit and spots[0] is not None and spots[0].port:
            self.values["start_port"] = Given("start_port", str(spots[0].port), endpoints.origin)
        if not self.values["nproc-per-node"].explicit:
            self.values["nproc-per-node"] = Given("nproc-per-node", str(len(spots) // len(hosts)), endpoints.origin)
        return self.values["ips"]

    def count_nodes(self) -> None:
        """nnodes: given, or the number of addresses that are."""
        ports, ips = self.variable("TRAINER_PORTS_NUM"), self._addresses()
        trainers, number = self.variable("PADDLE_TRAINERS"), self.variable("PADDLE_TRAINERS_NUM")
        if ips.text is not None and not ips.items():
            raise ips.wrong("a list of addresses such as 10.0.0.1,10.0.0.2")
        if trainers.text is not None and number.text is not None:
            count = len(trainers.items())
            # Some count pods, some count their workers.
            if number.whole(1) not in (count, count * (ports.whole(1) if ports.text else 1)):
                raise number.wrong(str(count), f"{trainers.where}={trainers.text!r} names as many")
        if self.values["nnodes"].explicit:
            return
        for given in (ips, trainers):
            if given.text is not None:
                self.values["nnodes"] = Given("nnodes", str(len(given.items())), given.origin)
                return
        if number.text is not None:
            self.values["nnodes"] = Given("nnodes", str(number.whole(1)), number.origin)

    def meet(self) -> None:
        """Where the nodes meet: at an etcd, else at the master, else at the first of their addresses."""
        _, most = rendezvous.nodes(self.values["nnodes"])
        place = self.agree("master", self.said(("master",), _master) + self.said(("elastic_server",), _etcd))
        ips, start, rank = self.values["ips"], self.settle("start_port"), self._rank()
        named = [name for name in ("rdzv-backend", "rdzv-endpoint", "master-addr") if self.values[name].explicit]
        alone = self.values["standalone"].on
        if most > 1 and place.text is None and not named:
            place = self._service()
        by_ips = ips.explicit and place.text is None and not alone
        if by_ips:
            self._check_count(ips)
        if (place.text or "").startswith(_ETCD) and not alone:
            self._at_etcd(place, rank)
        elif alone or most == 1:
            self._on_one_node(place, rank)
        elif place.text is not None:
            self._at_node(place, rank)
        elif by_ips:
            self._check_one_place(ips)
            self._static(ips, self._index(ips, rank), self._port(start, _IPS_PORT))
        elif not named:
            self._at_trainers(rank)
        if not by_ips:
            unused = (start, *((ips,) if self.values["nnodes"].origin != ips.origin else ()))
            self.idle += [given.where for given in unused if given.explicit]
        if not self.values["rdzv-id"].text and (most > 1 or self.values["rdzv-backend"].text == "etcdv3"):
            self.values["rdzv-id"] = Given("rdzv-id", "default")

    def _service(self) -> Given:
        """The etcd that Kubernetes tells every pod of."""
        host, port = (self.variable(name) for name in _SERVICE)
        if host.text is None:
            return host
        address = f"[{host.text}]" if ":" in host.text else host.text
        return Given("master", f"{_ETCD}{address}" + (f":{port.text}" if port.text else ""), host.origin)

    def _rank(self) -> Given:
        """The node's rank, where it is given; Paddle takes -1 for none."""
        said = [each for each in self.said(("node-rank", "rank")) if not re.fullmatch(r"-\d+", each.means)]
        return self.agree("node-rank", said)

    def _at_etcd(self, place: Given, rank: Given) -> None:
        endpoint = (place.text or "").removeprefix(_ETCD)
        backend = self.values["rdzv-backend"].text or ""
        same = {"rdzv-endpoint": endpoint, "rdzv-backend": backend if backend.startswith("etcd") else "etcdv3"}
        self._check_one_place(place, same)
        self._dynamic("etcdv3", endpoint, place, rank)

    def _on_one_node(self, place: Given, rank: Given) -> None:
        self._forget_rank(rank)
        if place.explicit:
            self.notes.append(f"{place.where} has no effect on one node: --nnodes says how many there are")

    def _at_node(self, place: Given, rank: Given) -> None:
        """One of the nodes; with a rank for each of a fixed number they are ordered by it."""
        assert place.text is not None
        self._check_one_place(place)
        least, most = rendezvous.nodes(self.values["nnodes"])
        if not rank.explicit or least < most:
            self._dynamic("embedded", place.text, place, rank)
            return
        spot = rendezvous.parsed(place.text)
        assert spot is not None
        self.values["master-addr"] = Given("master-addr", spot.host, place.origin)
        if spot.port is not None:
            self.values["master-port"] = Given("master-port", str(spot.port), place.origin)

    def _dynamic(self, backend: str, endpoint: str, place: Given, rank: Given) -> None:
        """Nodes that find their ranks themselves."""
        self.values["rdzv-backend"] = Given("rdzv-backend", backend, place.origin)
        self.values["rdzv-endpoint"] = Given("rdzv-endpoint", endpoint, place.origin)
        self._forget_rank(rank)

    def _forget_rank(self, rank: Given) -> None:
        """A rank that has no effect is told, unless it is what a cloud tells all its pods, or the only one."""
        if rank.where in ("--rank", "PADDLE_RANK", "PADDLE_TRAINER_ID"):
            self.values["node-rank"] = Given("node-rank", "0")
            if rank.where != "PADDLE_TRAINER_ID" and rank.text != "0":
                self.idle.append(rank.where)

    def _check_one_place(self, place: Given, same: Mapping[str, str | None] = MappingProxyType({})) -> None:
        """Paddle's words and ours must not name two places; ``same`` are ours that agree."""
        for name in ("rdzv-endpoint", "rdzv-backend", "master-addr", "master-port"):
            own = self.values[name]
            if own.explicit and own.text != same.get(name):
                raise UserError(f"{_as_said(place)} and {_as_said(own)} contradict each other: leave out one")

    def _check_count(self, hosts: Given) -> None:
        nnodes, count = self.values["nnodes"], len(hosts.items())
        if rendezvous.nodes(nnodes) != (count, count):
            raise UserError(
                f"{_as_said(nnodes)} contradicts {_as_said(hosts)}, which names {count}: leave out one of them"
            )

    def _static(self, hosts: Given, rank: Given, port: Given) -> None:
        """A fixed list of nodes: they meet at the first one, and their order is that of the ranks."""
        self.values["node-rank"] = rank
        self.values["master-addr"] = Given("master-addr", hosts.items()[0], hosts.origin)
        self.values["master-port"] = port

    def _port(self, given: Given, default: str) -> Given:
        if given.text is None:
            return Given("master-port", default)
        return Given("master-port", str(given.whole(1, 65535)), given.origin)

    def _index(self, ips: Given, rank: Given) -> Given:
        """Which of the addresses is this node's: the one of its rank, of its pod, or the one that is this machine's."""
        hosts, pod = ips.items(), self.environ.get("POD_IP") or self.values["host"].text
        if not rank.explicit:
            here = [at for at, host in enumerate(hosts) if host == pod]
            here = here or [at for at, host in enumerate(hosts) if self.machine.local(host)]
            if len(here) != 1:
                which = "several of them are" if here else "none of them is"
                raise UserError(
                    f"{ips.where}: expected one address of this machine in the list, got {ips.text!r}; {which}: "
                    "correct it, or add --rank N"
                )
            rank = Given("node-rank", str(here[0]), ips.origin)
        own = hosts[rank.whole(0, len(hosts) - 1)]
        if not pod and not self.values["local-addr"].explicit:
            self.values["local-addr"] = Given("local-addr", own, ips.origin)
        return rank

    def _at_trainers(self, rank: Given) -> None:
        trainers = self.variable("PADDLE_TRAINERS")
        if not trainers.items():
            raise UserError(
                f"{_as_said(self.values['nnodes'])}: several nodes need a place to meet; "
                "add --master etcd://HOST:2379, the same on all"
            )
        self._check_count(trainers)
        if not rank.explicit:
            raise UserError(f"{_as_said(trainers)}: which of them is this node? set PADDLE_TRAINER_ID, or add --rank N")
        self._static(trainers, rank, self._port(self.variable("PADDLE_PORT", "FLAGS_START_PORT"), _CLOUD_PORT))

    def address(self) -> None:
        """--host is --local-addr; a pod's own address counts among several nodes only, where ours is not given."""
        host, local = self.values["host"], self.values["local-addr"]
        if not host.explicit:
            return
        if local.origin.startswith("flag") and local.text != host.text:
            raise UserError(f"{_as_said(host)} and {_as_said(local)} contradict each other: leave out one")
        chosen = self.settle("host")
        if not local.explicit or chosen.origin.startswith("flag"):
            self.values["local-addr"] = Given("local-addr", chosen.text, chosen.origin)

    def level(self) -> None:
        """Both of Paddle's scales, and a budget that has nothing to be spent on."""
        least, most = rendezvous.nodes(self.values["nnodes"])
        by_level = {"-1": "0", "0": "1", "1": "2" if least < most else "1"}

        def mapped(given: Given) -> str:
            if (given.text or "").strip() not in by_level:
                raise given.wrong("-1 (off), 0 (fault-tolerant) or 1 (elastic)")
            return by_level[(given.text or "").strip()]

        said = self.said(("fault-tolerance-level",)) + self.said(("elastic_level",), mapped)
        level, restarts = self.agree("fault-tolerance-level", said), self.values["max-restarts"]
        if restarts.where in ("--max_restart", "PADDLE_MAX_RESTART") and restarts.whole(0) and level.text == "0":
            self.notes.append(f"{restarts.where} has no effect: {level.where} switches restarts off")
            self.values["max-restarts"] = Given("max-restarts", None)
        quiet = self.values["quiet-time"]
        if quiet.where in ("--elastic_timeout", "PADDLE_ELASTIC_TIMEOUT"):
            self.notes.append(
                f"{quiet.where} is how long to wait for further nodes at the start (--quiet-time): "
                "after a loss those that are left do not wait that long"
            )

    def choose_devices(self) -> tuple[tuple[str, ...], str]:
        """The devices by their place among the visible ones, and their kind."""
        said = self.said(("devices", *_KINDS))
        kinds = [_KINDS[each.where[2:]] for each in said if each.where[2:] in _KINDS]
        given = self.agree("devices", said)
        kind = kinds[0] if kinds else self._visible_kind()
        if given.text is None and kind == "gpu":
            return (), kind
        labels, source = self._visible(kind, given)
        if given.text is None:
            # GPUs are counted by whoever starts them; of the others only those are known that a variable names.
            return tuple(str(index) for index in range(len(labels or ()))), kind
        wanted = given.items()
        for item in wanted:
            if not (item in labels if labels is not None else re.fullmatch(r"\d+", item, re.ASCII)):
                raise given.wrong(f"numbers of visible {_NAMES[kind]}s, such as 0,1", f"{item!r} is none of {source}")
        if not wanted:
            raise given.wrong(f"numbers of {_NAMES[kind]}s, such as 0,1")
        return tuple(str(labels.index(item)) if labels is not None else item for item in wanted), kind

    def _visible_kind(self) -> str:
        if any(name in self.environ for name in _VISIBLE["xpu"][:2]):
            return "xpu"
        return "npu" if any(name in self.environ for name in _VISIBLE["npu"]) else "gpu"

    def _visible(self, kind: str, given: Given) -> tuple[list[str] | None, str]:
        """The names of the visible devices and who says so; None: they can't be told from outside."""
        for name in _VISIBLE[kind]:
            text = self.environ.get(name, "all")
            if text != "all":
                return [item.strip() for item in text.split(",") if item.strip()], f"{name}={text!r}"
        if kind != "gpu":
            return None, f"the {_NAMES[kind]}s here"
        count = gpu_count(self.machine, self.environ)
        if count == 0:
            raise UserError(
                f"{given.where} {given.text}: no GPU was found here; leave it out to train on CPUs, "
                "or use --xpus or --npus for other devices"
            )
        return [str(index) for index in range(count)], f"the {count} GPUs found here"

    def count_workers(self, devices: tuple[str, ...]) -> None:
        """nproc-per-node where it is not given: a worker for each chosen device, port of the pod, or GPU."""
        ports, gpus = self.variable("TRAINER_PORTS_NUM"), 0
        if self.values["nproc-per-node"].explicit:
            return
        if devices:
            made = Given("nproc-per-node", str(len(devices)), self.values["devices"].origin)
        elif ports.text is not None:
            made = Given("nproc-per-node", ports.text, ports.origin)
        else:
            gpus = gpu_count(self.machine, self.environ)
            made = Given("nproc-per-node", str(gpus), "default, one for each GPU")
        if devices or ports.text is not None or gpus:
            self.values["nproc-per-node"] = made


_VISIBLE = {
    "gpu": ("CUDA_VISIBLE_DEVICES",),
    "xpu": ("XPULINK_VISIBLE_DEVICES", "XPU_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "npu": ("NPU_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"),
}


def _settings_of(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The environment without what a worker was told of its place."""
    if "ELASTIC_GENERATION" not in environ:
        return environ
    told = WORKER_VARIABLES | OWN_WORKER_VARIABLES
    return {name: value for name, value in environ.items() if name not in told}


def _key(target: str, said: _Said) -> str:
    """Two nodes may be written as 2 and as 2:2."""
    single = target == "nnodes" and ":" not in said.means
    return f"{said.means}:{said.means}" if single else said.means


def _one_meaning(target: str, said: list[_Said]) -> None:
    if len({_key(target, each) for each in said}) > 1:
        first, other = said[0], next(each for each in said if _key(target, each) != _key(target, said[0]))
        what = "leave out one" if first.is_flag else "unset one"
        raise UserError(f"{first} and {other} contradict each other: {what}")


def _master(given: Given) -> str:
    """etcd://HOST:PORT,... or HOST:PORT."""
    text = (given.text or "").strip()
    if text.startswith(_ETCD):
        return _etcd(given)
    host = text.removeprefix("http://").rstrip("/")
    _check_user(given)
    if rendezvous.parsed(host) is None:
        raise given.wrong("etcd://HOST:PORT or HOST:PORT")
    return host


def _etcd(given: Given) -> str:
    _check_user(given)
    items = [item.strip().removeprefix(_ETCD).rstrip("/") for item in (given.text or "").split(",")]
    spots = [rendezvous.parsed(item) for item in items]
    if any(spot is None or spot.port == 0 for spot in spots):
        raise given.wrong("the etcd's HOST:PORT, or a list of them")
    return _ETCD + ",".join(items)


def _check_user(given: Given) -> None:
    if "@" in (given.text or ""):
        raise UserError(
            f"{given.where}: expected HOST:PORT without a user; give it by --etcd-user and ELASTIC_ETCD_PASSWORD"
        )
