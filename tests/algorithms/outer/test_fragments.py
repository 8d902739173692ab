"""Fragments: what of a model is one, also of a pipeline."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxslowmo as js
from jaxslowmo.algorithms.outer._fragments import Fragment, fragments_named
from jaxslowmo.checkpoint import Checkpoints
from jaxslowmo.tree import Staged
from support.layered import language_model, tokens


@given(st.lists(st.integers(0, 11), min_size=2, max_size=30), st.integers(1, 12))
def test_names_in_a_state_tell_the_fragments(numbers, count):
    """Whichever leaves a fragment has, and if all have a part of each leaf."""
    members = {number: [i for i, n in enumerate(numbers) if n == number] for number in numbers}
    fragments = tuple(
        Fragment(number, tuple(places))
        for number, places in enumerate(members[n] for n in sorted(members))
    )
    parts = tuple(Fragment(i, tuple(range(len(numbers))), count) for i in range(count))
    for divided in (fragments, parts if count > 1 else fragments):
        names = [f"{fragment.key}/w" for fragment in reversed(divided)]
        found = fragments_named(names, len(numbers))
        assert found == divided


@pytest.mark.parametrize("names", [["0:0/w", "1:2/w"], ["0:0/w", "w"], ["w", "b"], ["0:0-1@2/w"]])
def test_other_names_are_of_a_single_fragment(names):
    assert fragments_named(names, 2) == (Fragment(),)


@pytest.fixture(scope="module")
def pipeline():
    model, params = language_model(2)
    mesh = js.make_mesh({"replica": 2, "stage": 2})
    schedule = js.schedules.one_f_one_b(2, 2)

    def step_on(**options):
        pipe = js.pipelined(model, params, schedule, mesh=mesh)
        sync = js.diloco("replica", sync_every=6, **options)
        return js.make_train_step(pipe, optax.sgd(0.1), sync=sync, mesh=mesh, mode="host")

    return step_on, params


def test_each_device_of_a_pipeline_sends_a_part_of_its_stage(pipeline):
    step_on, params = pipeline
    sent = {}
    for fragments in (1, 2):
        step = step_on(fragments=fragments, shard_state=False)
        state = step.init(params)
        report = js.comm_report(step, state, tokens(16))
        sent[fragments] = [
            row.bytes
            for row in report.rows
            if row.level == "compiled" and row.axis == "replica" and "slow" in row.kind
        ]
    (whole,) = sent[1]
    assert len(sent[2]) == 2
    assert sum(sent[2]) == whole
    assert max(sent[2]) - min(sent[2]) <= 8


def test_a_pipeline_goes_on_in_other_fragments(pipeline, tmp_path):
    step_on, params = pipeline
    step, other = step_on(fragments=2, delay=1), step_on(fragments=3)
    state = step.init(params)
    for i in range(7):
        state, _ = step(state, tokens(16, seed=i))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(7, state, wait=True)
        resumed = checkpoints.restore(other, params).state
    anchors = [
        js.read_anchor(one.sync, x.opt_state[-1], x.params, mesh=one.mesh)
        for one, x in ((step, state), (other, resumed))
    ]
    jax.tree.map(np.testing.assert_array_equal, *anchors)
    other(resumed, tokens(16))


def test_an_outer_optimizer_that_mixes_elements_is_refused_in_stages(pipeline):
    step_on, params = pipeline
    mixing = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.7))
    step = step_on(fragments=2, shard_state=False, outer_optimizer=mixing)
    with pytest.raises(ValueError, match=r"every element by itself\. Use fragments=1"):
        step.init(params)
    few = Staged({"float32": jnp.ones((2, 3))}, "no layout of a model")
    with pytest.raises(ValueError, match="more than the elements of a stage's buffer, got 4 for 3"):
        js.local_sgd("replica", sync_every=12, fragments=4).init(few)
