"""One axis may stand for itself where a pipeline takes several."""

import pytest

import jaxslowmo as js
from support.layered import language_model

MODEL, PARAMS = language_model(2)


@pytest.mark.parametrize("data_axes", ["fsdp", ["fsdp"], ("fsdp",)])
def test_data_axes_may_be_a_name_or_names(mesh_of, data_axes):
    mesh, schedule = mesh_of({"stage": 2, "fsdp": 2}), js.schedules.gpipe(2, 2)
    pipe = js.pipelined(MODEL, PARAMS, schedule, mesh=mesh, data_axes=data_axes)
    assert pipe.data_axes == ("fsdp",)
    assert js.pipelined(MODEL, PARAMS, schedule, mesh=mesh).data_axes == ()
