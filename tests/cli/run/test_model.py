"""The model of a run, on the devices that share it: its form, and what does not fit."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.cli.config._training import train_config
from jaxslowmo.cli.run._model import form_of, saved_form
from jaxslowmo.models import init_gpt


def config(mesh=None, **values):
    return train_config({"preset": "demo", "batch": 8, "mesh": mesh, **values})


def test_parameters_go_into_stages_and_back():
    for values in ({}, {"tied": True}, {"pipeline": "zbv"}):
        form = form_of(config("stage=2,fsdp=2", **values))
        params = jax.tree.map(np.asarray, init_gpt(form.config))
        stacked = form.stack(params)
        assert {x.shape[0] for x in stacked.values()} == {2}
        assert all(spec[0] == "stage" for spec in form.layout.specs.values())
        jax.tree.map(np.testing.assert_array_equal, form.unstack(stacked), params)


def test_a_norm_counts_a_tied_table_once():
    params = jax.tree.map(np.asarray, init_gpt(form_of(config("stage=2", tied=True)).config))
    norms = []
    for tree in (params, form_of(config("stage=2", tied=True)).stack(params)):
        clip = js.clip_by_global_norm(1.0)
        norms.append(clip.update(tree, clip.init(tree))[1].norm)
    np.testing.assert_allclose(*norms, rtol=1e-6)


def test_nothing_is_shared_without_axes_for_it():
    form = form_of(config("replica=2,device=2"))
    assert (form.specs, form.layout) == (None, None)
    specs = form_of(config("fsdp=2,tensor=2")).specs
    assert specs["blocks"][0]["qkv"]["kernel"] == P("fsdp", "tensor")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mesh": "tensor=3"}, "tensor must divide the 4 attention heads of --preset demo, got 3"),
        ({"mesh": "fsdp=3", "batch": 6}, "fsdp must divide the 128 dimensions of the width"),
        ({"mesh": "stage=5"}, "5 stages need as many layers, and --preset demo has 4: an embed"),
        ({"mesh": "stage=2", "pipeline": "interleaved", "chunks": 3}, "2 stages of 3 chunks need"),
        ({"mesh": "stage=2", "dtype": "float16"}, "--dtype float16 does not go with stages"),
        ({"mesh": "stage=4", "pipeline": "interleaved", "microbatches": 2}, "microbatches"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        form_of(config(**given))


def test_a_saved_form_is_told_where_names_are_other_ones():
    def extra(run):
        return {"config": dataclasses.asdict(run)}

    plain, two = form_of(config("fsdp=2")), form_of(config("stage=2"))
    assert saved_form(extra(config()), plain) is None
    assert saved_form(extra(config("replica=2,stage=2")), two) is None
    found = saved_form(extra(config()), two)
    params = jax.tree.map(np.asarray, init_gpt(plain.config, seed=3))
    jax.tree.map(np.testing.assert_array_equal, found.convert(params), two.stack(params))
    # Which layers lie in which stages is what a checkpoint tells by itself.
    other = form_of(config("stage=2", pipeline="zbv"))
    assert saved_form(extra(config("stage=2", pipeline="interleaved")), other) is None
