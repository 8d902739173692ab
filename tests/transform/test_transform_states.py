"""Stacked state on the host; `tests/checkpoint/test_resize.py` has it on other replicas."""

from jaxslowmo.transform import StatePlacement


def test_names_inside_of_a_field_are_those_after_it():
    names = ("base/anchor/w", "1/base/base/x", "anchor/base", "database/y")
    assert StatePlacement(1, {}, names=names).inside("base").names == ("anchor/w", "base/x")
