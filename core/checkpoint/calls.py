"""What a user's program calls."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from elastic_adapter.core.errors import ElasticError

log = logging.getLogger(__name__)

_P = ParamSpec("_P")
_R = TypeVar("_R")


def plainly(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Our errors point to the line that called us, and not into our own code, which is logged for who debugs that."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except ElasticError as error:
            if error.__cause__ is not None:
                # Somebody else's error: where that was raised is what people look for.
                raise
            log.debug("%s", error, exc_info=True)
            raise error.with_traceback(None) from None

    return call
