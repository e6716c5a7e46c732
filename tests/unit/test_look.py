"""What is shown of a job, in words that workers wrote."""

from __future__ import annotations

import pytest

from elastic_adapter.core.ports import Note
from elastic_adapter.launchers.look import Status, _show

GLOO = "RuntimeError: [/paddle/gloo/transport/tcp/pair.cc:547] Connection closed by peer; weights [red] of [conv1]"


@pytest.mark.parametrize(
    "found",
    [
        (Note(1, 1, 0.0, "cause", GLOO),),
        Status("j", 1, "holding", GLOO, 1, 2, None, 0, 0, 0, excluded={"n[0]": GLOO}),
    ],
)
def test_words_that_look_like_markup_are_shown_as_they_are(found, capsys):
    """Errors of gloo begin with a path in brackets."""
    _show(found, as_json=False)
    assert GLOO in " ".join(capsys.readouterr().out.split())
