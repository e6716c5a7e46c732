"""For programs that train with paddle: checkpoints and the data position. paddle is imported when it is used first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_adapter.adapters.paddlepaddle.checkpoint import (
        Checkpointer,
        NotSaved,
        load_checkpoint,
        save_checkpoint,
    )
    from elastic_adapter.core.checkpoint.sampler import ElasticBatchSampler, ElasticSampler

__all__ = ["Checkpointer", "ElasticBatchSampler", "ElasticSampler", "NotSaved", "load_checkpoint", "save_checkpoint"]


def __getattr__(name: str) -> Any:
    """The launcher imports this package as well, and has no use for what it would take to import these."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name.startswith("Elastic"):
        from elastic_adapter.core.checkpoint import sampler

        return getattr(sampler, name)
    from elastic_adapter.adapters.paddlepaddle import checkpoint

    return getattr(checkpoint, name)
