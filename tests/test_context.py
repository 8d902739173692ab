"""Values that hold inside of a `with`, and no longer."""

from contextvars import ContextVar

import pytest

from jaxslowmo._context import setting

VARIABLE: ContextVar[int] = ContextVar("VARIABLE", default=0)


def test_a_value_holds_inside_alone():
    with setting(VARIABLE, 1) as outer:
        with setting(VARIABLE, 2):
            assert VARIABLE.get() == 2
        assert VARIABLE.get() == outer == 1
    assert VARIABLE.get() == 0


def test_it_ends_with_an_error():
    with pytest.raises(ValueError, match="inside"), setting(VARIABLE, 1):
        raise ValueError("inside")
    assert VARIABLE.get() == 0
