"""A checkpoint records where the layers of a pipeline lie: other stages restore what they hold."""

import jax
import numpy as np
import optax
import pytest

import jaxslowmo as js
from checkpoint.moves import LAST, SAVED, Run, once_saved
from checkpoint.runs import leaf_bytes, on_host
from jaxslowmo.checkpoint import CheckpointError, Checkpoints
from support.layered import assert_close, language_model, tokens

pytestmark = pytest.mark.xdist_group("recorded stages")  # they share runs

MODEL, LAYERS = language_model(4)
PLACES = {
    "none": None,
    "interleaved": ("interleaved", 2),
    "zbv": ("zbv", 2),
}


SYNCS = {
    "slowmo": lambda: js.slowmo(
        "replica", base=js.local_sgd("replica", sync_every=2), sync_every=4, momentum=0.6
    ),
    "sgp": lambda: js.sgp("replica", overlap=2),  # messages are in flight
}


class Staged(Run):
    """A step of the language model on some stages, or on none."""

    def __init__(self, place, sync, mesh_of, *, model=MODEL, layers=LAYERS):
        self.params, self.unstack = layers, lambda tree: tree
        loss_fn = model
        mesh = mesh_of({"replica": 2})
        if PLACES[place] is not None:
            schedule = js.schedules.by_name(*PLACES[place], 4, 2)
            mesh = mesh_of({"replica": 2, "stage": schedule.num_stages})
            self.pipe = loss_fn = js.pipelined(model, layers, schedule, mesh=mesh)
            self.unstack = loss_fn.layout.unstack_like
        adam = optax.adamw(1e-2)
        self.step = js.make_train_step(loss_fn, adam, mesh=mesh, sync=SYNCS[sync]())

    def batch(self, t):
        return tokens(16, t)

    def values(self, state):
        """Return the state with the model's trees."""
        return self.unstack(on_host(state))


@pytest.fixture(scope="module")
def saved(mesh_of, tmp_path_factory):
    return once_saved(lambda place, sync: Staged(place, sync, mesh_of), tmp_path_factory)


@pytest.mark.parametrize(
    ("old", "new", "sync", "said"),
    [
        ("interleaved", "zbv", "slowmo", "other places on the 2 stages"),
        ("interleaved", "none", "slowmo", "from 2 stages"),
        ("none", "zbv", "sgp", "to 2 stages"),
    ],
)
def test_a_run_goes_on_with_the_layers_that_it_had(old, new, sync, said, saved, mesh_of):
    then_run, folder, then, end = saved(old, sync)
    run = Staged(new, sync, mesh_of)
    found = Checkpoints(folder).restore(run.step, LAYERS)
    assert found.is_exact
    (note,) = found.notes
    assert said in note
    jax.tree.map(np.testing.assert_array_equal, run.values(found.state), then)
    last = run.unstack(on_host(run.trained(found.state, SAVED, LAST).params))
    assert_close(last, then_run.unstack(on_host(end.params)), 1e-5)


def test_equal_stages_restore_every_bit(saved, mesh_of):
    _, folder, then, _ = saved("interleaved", "slowmo")
    run = Staged("interleaved", "slowmo", mesh_of)
    for params in (LAYERS, run.pipe.layout.stack(LAYERS)):
        found = Checkpoints(folder).restore(run.step, params)
        assert (found.is_exact, found.notes) == (True, ())
        assert leaf_bytes(run.values(found.state)) == leaf_bytes(then)


def renamed():
    """Return the model with another name for an array of layer 3."""

    def block(params, x):
        return MODEL.layers[3]({**params, "up": params["rise"]}, x)

    own = {"rise" if name == "up" else name: x for name, x in LAYERS[3].items()}
    functions = [*MODEL.layers[:3], block, *MODEL.layers[4:]]
    model = js.LayeredModel(functions, MODEL.loss, tied=MODEL.tied)
    return model, [*LAYERS[:3], own, *LAYERS[4:]]


def test_a_parameter_may_have_had_another_name(saved, mesh_of):
    """With it go its moments, anchor and momentum; names that the checkpoint has stay."""
    _, folder, then, _ = saved("interleaved", "slowmo")
    model, layers = renamed()
    run = Staged("none", "slowmo", mesh_of, model=model, layers=layers)
    with pytest.raises(CheckpointError, match=r"params/3/up is float32\[4,6\] .* missing"):
        Checkpoints(folder).restore(run.step, layers)
    names = {"3/rise": "3/up", "1/up": "2/up"}
    found = Checkpoints(folder).restore(run.step, layers, names=names)
    assert found.is_exact

    def back(x):
        return {"up" if name == "rise" else name: y for name, y in x.items()}

    now = jax.tree.map(
        lambda x: back(x) if isinstance(x, dict) and "rise" in x else x,
        run.values(found.state),
        is_leaf=lambda x: isinstance(x, dict) and "rise" in x,
    )
    jax.tree.map(np.testing.assert_array_equal, now, then)
