"""Values of arguments that are no choice, and processes that were not joined."""

from typing import Literal

import numpy as np
import pytest

from jaxslowmo._support import coordinator
from jaxslowmo._support.checks import check_choice
from support.refusals import Refusal, each

Colour = Literal["red", "green", "blue"]


def choice(value):
    return Refusal(lambda: check_choice("colour", value, Colour), "`colour`", repr(value))


ROWS = {
    "another name": choice("Red"),
    "no name": choice(None),
    "an array": choice(np.zeros(2)),
    "processes that were not joined": Refusal(
        lambda: coordinator.read_note("a"), "jax.distributed.initialize", error=RuntimeError
    ),
}


@each(ROWS)
def test_refused(refusal):
    refusal.check()


def test_names_pass_and_are_listed_behind_the_owner():
    for name in ("red", "green", "blue"):
        check_choice("colour", name, Colour)
    with pytest.raises(ValueError, match=r'^paint: .*"red", "green" or "blue"'):
        check_choice("colour", "up", Colour, "paint")
