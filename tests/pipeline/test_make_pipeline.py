"""Models and schedules that are none, and axes by one name."""

import re

import pytest

import jaxslowmo as js
from jaxslowmo.pipeline._make_pipeline import as_axes, check_pipeline

MODEL = js.LayeredModel([lambda params, x: x], lambda x, batch: x.mean())
SCHEDULE = js.schedules.gpipe(1, 1)


def test_models_and_schedules_pass_and_others_are_named():
    check_pipeline(MODEL, SCHEDULE)
    with pytest.raises(ValueError, match=re.escape("js.LayeredModel, of functions")):
        check_pipeline([MODEL], SCHEDULE)
    with pytest.raises(
        ValueError, match=r"`schedule` must be a js\.pipeline\.Schedule .* got 'gpipe'"
    ):
        check_pipeline(MODEL, "gpipe")


def test_one_axis_may_stand_for_itself():
    assert as_axes("fsdp") == ("fsdp",)
    assert as_axes(["fsdp", "tensor"]) == ("fsdp", "tensor")
    assert as_axes(()) == ()
