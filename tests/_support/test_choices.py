"""Arguments that are one of a few names."""

import re
from typing import Literal

import numpy as np
import pytest

from jaxslowmo._support.checks import check_choice

Colour = Literal["red", "green", "blue"]


@pytest.mark.parametrize("name", ["red", "green", "blue"])
def test_each_name_passes(name):
    check_choice("colour", name, Colour)


@pytest.mark.parametrize("value", ["Red", "", None, 1, ("red",), np.zeros(2)])
def test_others_are_named_with_the_rule(value):
    said = f'`colour` must be "red", "green" or "blue", got {value!r}.'
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        check_choice("colour", value, Colour)


def test_the_owner_stands_in_front():
    with pytest.raises(ValueError, match=r"""^paint: `side` must be "in" or "out", got 'up'\.$"""):
        check_choice("side", "up", Literal["in", "out"], "paint")
