"""The collector of garbage is paused, and is afterwards what it was."""

import contextlib
import gc
import weakref

import pytest

from elastic_adapter.core.checkpoint.garbage import uncollected


class Cycle:
    def __init__(self):
        self.itself = self


@pytest.fixture(autouse=True)
def collector():
    was_on = gc.isenabled()
    yield
    (gc.enable if was_on else gc.disable)()


def test_nothing_is_collected_meanwhile():
    """However much is made; what is garbage goes later."""
    gc.enable()
    with uncollected():
        gone = weakref.ref(Cycle())
        made = [[] for _ in range(200_000)]
        assert gone() is not None
    del made
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_it_is_what_it_was(is_on, fails):
    """Also where what was done failed, and where it was off before."""
    (gc.enable if is_on else gc.disable)()
    with contextlib.suppress(ZeroDivisionError), uncollected():
        assert not gc.isenabled()
        assert 1 / (not fails)
    assert gc.isenabled() is is_on
