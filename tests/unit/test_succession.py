"""What an agent does about the leader."""

import pytest

from elastic_adapter.core.ports import Leader
from elastic_adapter.core.succession import Answer, Ask, Broken, Depose, Resign, Wait, next_move

ME = "10.0.0.1:7"
OTHER = Leader("b", "10.0.0.2:7", epoch=12)
MINE = Leader("a", ME, epoch=12)


def broken(*, epoch=12, had_stream=True, steps_down=False):
    return Broken(epoch, had_stream, steps_down)


@pytest.mark.parametrize(
    ("leader", "before", "answer", "move"),
    [
        pytest.param(OTHER, None, None, Ask, id="nothing has happened yet"),
        pytest.param(MINE, None, None, Ask, id="we won"),
        pytest.param(OTHER, broken(epoch=11), None, Ask, id="somebody else leads by now"),
        pytest.param(OTHER, broken(), Answer.REFUSED, Depose, id="it is dead"),
        pytest.param(OTHER, broken(), Answer.OPEN, Ask, id="the stream broke, and it lives"),
        pytest.param(OTHER, broken(), Answer.SILENT, Wait, id="a silent host is left to its lease"),
        pytest.param(OTHER, broken(), Answer.UNKNOWN, Wait, id="its name is not known any more"),
        pytest.param(OTHER, broken(steps_down=True), Answer.OPEN, Depose, id="it lives, and does not lead"),
        pytest.param(OTHER, broken(had_stream=False), Answer.REFUSED, Wait, id="who had no stream deposes nobody"),
        pytest.param(
            OTHER, broken(had_stream=False, steps_down=True), Answer.OPEN, Ask, id="who had no stream asks again"
        ),
        pytest.param(OTHER, broken(had_stream=False), Answer.SILENT, Wait, id="who had no stream waits"),
        pytest.param(MINE, broken(), Answer.OPEN, Resign, id="we led and failed: in a later epoch again"),
    ],
)
def test_next_move(leader, before, answer, move):
    """Only a leader that is dead, or says that it does not lead, is deposed, and only by who had a stream to it."""
    assert isinstance(next_move(leader, ME, before, answer), move)


def test_the_reason_is_told():
    """A person who reads of a succession reads why."""
    assert next_move(OTHER, ME, broken(), Answer.REFUSED).reason == "nobody listens there any more"
    assert next_move(OTHER, ME, broken(steps_down=True), Answer.OPEN).reason == "it says that it does not lead"
