from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Part(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STAGED: _ClassVar[Part]
    WRITTEN: _ClassVar[Part]
    MISSED: _ClassVar[Part]
STAGED: Part
WRITTEN: Part
MISSED: Part

class Report(_message.Message):
    __slots__ = ("hello", "ports_offered", "worker_exited", "node_drained", "leaving", "stop_requested", "member_ready", "node_stopped", "pong", "node_progressed", "stacks_dumped", "node_checked", "worker_erred", "checkpointer_opened", "save_wanted", "steps_reached", "shard_reported", "checkpoint_prepared", "checkpoint_published", "checkpoints_found", "restore_failed", "checkpointer_closed", "checkpoint_noted")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PORTS_OFFERED_FIELD_NUMBER: _ClassVar[int]
    WORKER_EXITED_FIELD_NUMBER: _ClassVar[int]
    NODE_DRAINED_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    STOP_REQUESTED_FIELD_NUMBER: _ClassVar[int]
    MEMBER_READY_FIELD_NUMBER: _ClassVar[int]
    NODE_STOPPED_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    NODE_PROGRESSED_FIELD_NUMBER: _ClassVar[int]
    STACKS_DUMPED_FIELD_NUMBER: _ClassVar[int]
    NODE_CHECKED_FIELD_NUMBER: _ClassVar[int]
    WORKER_ERRED_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTER_OPENED_FIELD_NUMBER: _ClassVar[int]
    SAVE_WANTED_FIELD_NUMBER: _ClassVar[int]
    STEPS_REACHED_FIELD_NUMBER: _ClassVar[int]
    SHARD_REPORTED_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_PREPARED_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FOUND_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FAILED_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTER_CLOSED_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_NOTED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    ports_offered: PortsOffered
    worker_exited: WorkerExited
    node_drained: NodeDrained
    leaving: Leaving
    stop_requested: StopRequested
    member_ready: MemberReady
    node_stopped: NodeStopped
    pong: Pong
    node_progressed: NodeProgressed
    stacks_dumped: StacksDumped
    node_checked: NodeChecked
    worker_erred: WorkerExited
    checkpointer_opened: CheckpointerOpened
    save_wanted: SaveWanted
    steps_reached: StepsReached
    shard_reported: ShardReported
    checkpoint_prepared: CheckpointPrepared
    checkpoint_published: CheckpointPublished
    checkpoints_found: CheckpointsFound
    restore_failed: RestoreFailed
    checkpointer_closed: CheckpointerClosed
    checkpoint_noted: CheckpointNoted
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., ports_offered: _Optional[_Union[PortsOffered, _Mapping]] = ..., worker_exited: _Optional[_Union[WorkerExited, _Mapping]] = ..., node_drained: _Optional[_Union[NodeDrained, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ..., stop_requested: _Optional[_Union[StopRequested, _Mapping]] = ..., member_ready: _Optional[_Union[MemberReady, _Mapping]] = ..., node_stopped: _Optional[_Union[NodeStopped, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., node_progressed: _Optional[_Union[NodeProgressed, _Mapping]] = ..., stacks_dumped: _Optional[_Union[StacksDumped, _Mapping]] = ..., node_checked: _Optional[_Union[NodeChecked, _Mapping]] = ..., worker_erred: _Optional[_Union[WorkerExited, _Mapping]] = ..., checkpointer_opened: _Optional[_Union[CheckpointerOpened, _Mapping]] = ..., save_wanted: _Optional[_Union[SaveWanted, _Mapping]] = ..., steps_reached: _Optional[_Union[StepsReached, _Mapping]] = ..., shard_reported: _Optional[_Union[ShardReported, _Mapping]] = ..., checkpoint_prepared: _Optional[_Union[CheckpointPrepared, _Mapping]] = ..., checkpoint_published: _Optional[_Union[CheckpointPublished, _Mapping]] = ..., checkpoints_found: _Optional[_Union[CheckpointsFound, _Mapping]] = ..., restore_failed: _Optional[_Union[RestoreFailed, _Mapping]] = ..., checkpointer_closed: _Optional[_Union[CheckpointerClosed, _Mapping]] = ..., checkpoint_noted: _Optional[_Union[CheckpointNoted, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("node", "address", "slots", "ports", "running", "exits", "seen", "order", "control", "cold", "checking", "savers", "shards", "found")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    PORTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    EXITS_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    CONTROL_FIELD_NUMBER: _ClassVar[int]
    COLD_FIELD_NUMBER: _ClassVar[int]
    CHECKING_FIELD_NUMBER: _ClassVar[int]
    SAVERS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    node: str
    address: str
    slots: int
    ports: _containers.RepeatedScalarFieldContainer[int]
    running: int
    exits: _containers.RepeatedCompositeFieldContainer[WorkerExited]
    seen: int
    order: int
    control: str
    cold: bool
    checking: bool
    savers: _containers.RepeatedScalarFieldContainer[int]
    shards: _containers.RepeatedCompositeFieldContainer[Shard]
    found: Checkpoints
    def __init__(self, node: _Optional[str] = ..., address: _Optional[str] = ..., slots: _Optional[int] = ..., ports: _Optional[_Iterable[int]] = ..., running: _Optional[int] = ..., exits: _Optional[_Iterable[_Union[WorkerExited, _Mapping]]] = ..., seen: _Optional[int] = ..., order: _Optional[int] = ..., control: _Optional[str] = ..., cold: bool = ..., checking: bool = ..., savers: _Optional[_Iterable[int]] = ..., shards: _Optional[_Iterable[_Union[Shard, _Mapping]]] = ..., found: _Optional[_Union[Checkpoints, _Mapping]] = ...) -> None: ...

class CheckpointerOpened(_message.Message):
    __slots__ = ("generation", "rank")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    generation: int
    rank: int
    def __init__(self, generation: _Optional[int] = ..., rank: _Optional[int] = ...) -> None: ...

class CheckpointerClosed(_message.Message):
    __slots__ = ("generation", "rank")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    generation: int
    rank: int
    def __init__(self, generation: _Optional[int] = ..., rank: _Optional[int] = ...) -> None: ...

class CheckpointNoted(_message.Message):
    __slots__ = ("generation", "rank", "words")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    rank: int
    words: str
    def __init__(self, generation: _Optional[int] = ..., rank: _Optional[int] = ..., words: _Optional[str] = ...) -> None: ...

class SaveWanted(_message.Message):
    __slots__ = ("generation", "reason")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    generation: int
    reason: str
    def __init__(self, generation: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class StepsReached(_message.Message):
    __slots__ = ("generation", "number", "step")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    generation: int
    number: int
    step: int
    def __init__(self, generation: _Optional[int] = ..., number: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("rank", "step", "part", "why")
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    rank: int
    step: int
    part: Part
    why: str
    def __init__(self, rank: _Optional[int] = ..., step: _Optional[int] = ..., part: _Optional[_Union[Part, str]] = ..., why: _Optional[str] = ...) -> None: ...

class ShardReported(_message.Message):
    __slots__ = ("generation", "shard")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    generation: int
    shard: Shard
    def __init__(self, generation: _Optional[int] = ..., shard: _Optional[_Union[Shard, _Mapping]] = ...) -> None: ...

class CheckpointPrepared(_message.Message):
    __slots__ = ("generation", "step", "uri", "trouble")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    uri: str
    trouble: str
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., uri: _Optional[str] = ..., trouble: _Optional[str] = ...) -> None: ...

class CheckpointPublished(_message.Message):
    __slots__ = ("generation", "step", "trouble", "pruned")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    PRUNED_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    trouble: str
    pruned: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., trouble: _Optional[str] = ..., pruned: _Optional[_Iterable[str]] = ...) -> None: ...

class CheckpointsFound(_message.Message):
    __slots__ = ("generation", "found")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    generation: int
    found: Checkpoints
    def __init__(self, generation: _Optional[int] = ..., found: _Optional[_Union[Checkpoints, _Mapping]] = ...) -> None: ...

class Checkpoints(_message.Message):
    __slots__ = ("checkpoints",)
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    checkpoints: _containers.RepeatedCompositeFieldContainer[Checkpoint]
    def __init__(self, checkpoints: _Optional[_Iterable[_Union[Checkpoint, _Mapping]]] = ...) -> None: ...

class RestoreFailed(_message.Message):
    __slots__ = ("generation", "rank", "name", "why")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    generation: int
    rank: int
    name: str
    why: str
    def __init__(self, generation: _Optional[int] = ..., rank: _Optional[int] = ..., name: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class PortsOffered(_message.Message):
    __slots__ = ("ports", "seen")
    PORTS_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    ports: _containers.RepeatedScalarFieldContainer[int]
    seen: int
    def __init__(self, ports: _Optional[_Iterable[int]] = ..., seen: _Optional[int] = ...) -> None: ...

class MemberReady(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeStopped(_message.Message):
    __slots__ = ("generation", "reason")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    generation: int
    reason: str
    def __init__(self, generation: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class NodeProgressed(_message.Message):
    __slots__ = ("generation", "marks")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    marks: _containers.RepeatedCompositeFieldContainer[Mark]
    def __init__(self, generation: _Optional[int] = ..., marks: _Optional[_Iterable[_Union[Mark, _Mapping]]] = ...) -> None: ...

class Mark(_message.Message):
    __slots__ = ("count", "step")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    count: int
    step: int
    def __init__(self, count: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class StacksDumped(_message.Message):
    __slots__ = ("generation", "stacks")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STACKS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    stacks: _containers.RepeatedCompositeFieldContainer[StackReport]
    def __init__(self, generation: _Optional[int] = ..., stacks: _Optional[_Iterable[_Union[StackReport, _Mapping]]] = ...) -> None: ...

class StackReport(_message.Message):
    __slots__ = ("rank", "place", "waits", "text", "file", "pid", "at")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    rank: int
    place: str
    waits: str
    text: str
    file: str
    pid: int
    at: float
    def __init__(self, rank: _Optional[int] = ..., place: _Optional[str] = ..., waits: _Optional[str] = ..., text: _Optional[str] = ..., file: _Optional[str] = ..., pid: _Optional[int] = ..., at: _Optional[float] = ...) -> None: ...

class NodeChecked(_message.Message):
    __slots__ = ("trouble",)
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    trouble: str
    def __init__(self, trouble: _Optional[str] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerExited(_message.Message):
    __slots__ = ("generation", "local_rank", "rank", "code", "signal", "at", "pid", "detail_source", "detail", "node", "error", "age_s", "oom", "step", "hang", "stack_file")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DETAIL_SOURCE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    OOM_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HANG_FIELD_NUMBER: _ClassVar[int]
    STACK_FILE_FIELD_NUMBER: _ClassVar[int]
    generation: int
    local_rank: int
    rank: int
    code: int
    signal: int
    at: float
    pid: int
    detail_source: str
    detail: str
    node: str
    error: str
    age_s: float
    oom: bool
    step: int
    hang: str
    stack_file: str
    def __init__(self, generation: _Optional[int] = ..., local_rank: _Optional[int] = ..., rank: _Optional[int] = ..., code: _Optional[int] = ..., signal: _Optional[int] = ..., at: _Optional[float] = ..., pid: _Optional[int] = ..., detail_source: _Optional[str] = ..., detail: _Optional[str] = ..., node: _Optional[str] = ..., error: _Optional[str] = ..., age_s: _Optional[float] = ..., oom: bool = ..., step: _Optional[int] = ..., hang: _Optional[str] = ..., stack_file: _Optional[str] = ...) -> None: ...

class NodeDrained(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ("signal",)
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    signal: int
    def __init__(self, signal: _Optional[int] = ...) -> None: ...

class StopRequested(_message.Message):
    __slots__ = ("signal",)
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    signal: int
    def __init__(self, signal: _Optional[int] = ...) -> None: ...

class Directive(_message.Message):
    __slots__ = ("epoch", "run", "drain", "hold", "halt", "ping", "wait", "dump", "check", "explain", "pause", "save_at", "prepare", "publish", "resume", "settle", "drop")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    HALT_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    DUMP_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    SAVE_AT_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    SETTLE_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    run: Run
    drain: Drain
    hold: Hold
    halt: Halt
    ping: Ping
    wait: Wait
    dump: Dump
    check: Check
    explain: Explain
    pause: Pause
    save_at: SaveAt
    prepare: Prepare
    publish: Publish
    resume: Resume
    settle: Settle
    drop: Drop
    def __init__(self, epoch: _Optional[int] = ..., run: _Optional[_Union[Run, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., hold: _Optional[_Union[Hold, _Mapping]] = ..., halt: _Optional[_Union[Halt, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., wait: _Optional[_Union[Wait, _Mapping]] = ..., dump: _Optional[_Union[Dump, _Mapping]] = ..., check: _Optional[_Union[Check, _Mapping]] = ..., explain: _Optional[_Union[Explain, _Mapping]] = ..., pause: _Optional[_Union[Pause, _Mapping]] = ..., save_at: _Optional[_Union[SaveAt, _Mapping]] = ..., prepare: _Optional[_Union[Prepare, _Mapping]] = ..., publish: _Optional[_Union[Publish, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., settle: _Optional[_Union[Settle, _Mapping]] = ..., drop: _Optional[_Union[Drop, _Mapping]] = ...) -> None: ...

class Pause(_message.Message):
    __slots__ = ("generation", "number", "reason")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    generation: int
    number: int
    reason: str
    def __init__(self, generation: _Optional[int] = ..., number: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class SaveAt(_message.Message):
    __slots__ = ("generation", "number", "step", "hold", "reason")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    generation: int
    number: int
    step: int
    hold: bool
    reason: str
    def __init__(self, generation: _Optional[int] = ..., number: _Optional[int] = ..., step: _Optional[int] = ..., hold: bool = ..., reason: _Optional[str] = ...) -> None: ...

class Prepare(_message.Message):
    __slots__ = ("generation", "step")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Publish(_message.Message):
    __slots__ = ("generation", "step")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Settle(_message.Message):
    __slots__ = ("generation", "step", "trouble")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    trouble: str
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., trouble: _Optional[str] = ...) -> None: ...

class Drop(_message.Message):
    __slots__ = ("generation", "step", "why")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    why: str
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("generation", "checkpoint")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    generation: int
    checkpoint: Checkpoint
    def __init__(self, generation: _Optional[int] = ..., checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ...) -> None: ...

class Dump(_message.Message):
    __slots__ = ("generation", "reason")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    generation: int
    reason: str
    def __init__(self, generation: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Check(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Explain(_message.Message):
    __slots__ = ("generation", "first", "others", "more", "decision", "restarts_left")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_LEFT_FIELD_NUMBER: _ClassVar[int]
    generation: int
    first: WorkerExited
    others: _containers.RepeatedCompositeFieldContainer[WorkerExited]
    more: int
    decision: str
    restarts_left: int
    def __init__(self, generation: _Optional[int] = ..., first: _Optional[_Union[WorkerExited, _Mapping]] = ..., others: _Optional[_Iterable[_Union[WorkerExited, _Mapping]]] = ..., more: _Optional[int] = ..., decision: _Optional[str] = ..., restarts_left: _Optional[int] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("host", "port")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("step", "generation", "uri")
    STEP_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    step: int
    generation: int
    uri: str
    def __init__(self, step: _Optional[int] = ..., generation: _Optional[int] = ..., uri: _Optional[str] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("generation", "restart_count", "group_rank", "group_size", "rank_offset", "slots", "world_size", "master", "reason", "resume_from", "start_delay_s", "peers")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RESTART_COUNT_FIELD_NUMBER: _ClassVar[int]
    GROUP_RANK_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    RANK_OFFSET_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    MASTER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RESUME_FROM_FIELD_NUMBER: _ClassVar[int]
    START_DELAY_S_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    restart_count: int
    group_rank: int
    group_size: int
    rank_offset: int
    slots: int
    world_size: int
    master: Endpoint
    reason: str
    resume_from: Checkpoint
    start_delay_s: float
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    def __init__(self, generation: _Optional[int] = ..., restart_count: _Optional[int] = ..., group_rank: _Optional[int] = ..., group_size: _Optional[int] = ..., rank_offset: _Optional[int] = ..., slots: _Optional[int] = ..., world_size: _Optional[int] = ..., master: _Optional[_Union[Endpoint, _Mapping]] = ..., reason: _Optional[str] = ..., resume_from: _Optional[_Union[Checkpoint, _Mapping]] = ..., start_delay_s: _Optional[float] = ..., peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("address", "slots")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    address: str
    slots: int
    def __init__(self, address: _Optional[str] = ..., slots: _Optional[int] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("generation", "grace_s", "reason")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    generation: int
    grace_s: float
    reason: str
    def __init__(self, generation: _Optional[int] = ..., grace_s: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class Wait(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Hold(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Halt(_message.Message):
    __slots__ = ("succeeded", "failed", "stopped")
    SUCCEEDED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    succeeded: Succeeded
    failed: Failed
    stopped: Stopped
    def __init__(self, succeeded: _Optional[_Union[Succeeded, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., stopped: _Optional[_Union[Stopped, _Mapping]] = ...) -> None: ...

class Succeeded(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("reason", "first", "alone", "others", "more", "restarts_left")
    REASON_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_LEFT_FIELD_NUMBER: _ClassVar[int]
    reason: str
    first: WorkerExited
    alone: bool
    others: _containers.RepeatedCompositeFieldContainer[WorkerExited]
    more: int
    restarts_left: int
    def __init__(self, reason: _Optional[str] = ..., first: _Optional[_Union[WorkerExited, _Mapping]] = ..., alone: bool = ..., others: _Optional[_Iterable[_Union[WorkerExited, _Mapping]]] = ..., more: _Optional[int] = ..., restarts_left: _Optional[int] = ...) -> None: ...

class Stopped(_message.Message):
    __slots__ = ("reason", "signal", "alone")
    REASON_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    signal: int
    alone: bool
    def __init__(self, reason: _Optional[str] = ..., signal: _Optional[int] = ..., alone: bool = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class ClearReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("job_id", "phase", "reason", "generation", "world_size", "restarts_used", "max_restarts", "level", "members")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_USED_FIELD_NUMBER: _ClassVar[int]
    MAX_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    phase: str
    reason: str
    generation: int
    world_size: int
    restarts_used: int
    max_restarts: int
    level: int
    members: _containers.RepeatedCompositeFieldContainer[MemberStatus]
    def __init__(self, job_id: _Optional[str] = ..., phase: _Optional[str] = ..., reason: _Optional[str] = ..., generation: _Optional[int] = ..., world_size: _Optional[int] = ..., restarts_used: _Optional[int] = ..., max_restarts: _Optional[int] = ..., level: _Optional[int] = ..., members: _Optional[_Iterable[_Union[MemberStatus, _Mapping]]] = ...) -> None: ...

class MemberStatus(_message.Message):
    __slots__ = ("node", "address", "slots", "group_rank")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GROUP_RANK_FIELD_NUMBER: _ClassVar[int]
    node: str
    address: str
    slots: int
    group_rank: int
    def __init__(self, node: _Optional[str] = ..., address: _Optional[str] = ..., slots: _Optional[int] = ..., group_rank: _Optional[int] = ...) -> None: ...
