"""A checkpoint records where the layers of a pipeline lie: other stages restore what they hold."""

import jax
import numpy as np
import optax
import pytest

import jaxslowmo as js
from checkpoint.moves import LAST, SAVED, Run, once_saved
from checkpoint.runs import leaf_bytes, on_host
from jaxslowmo.checkpoint import CheckpointError, Checkpoints
from support.exhaustive import sweep
from support.layered import assert_close, language_model, tokens

pytestmark = pytest.mark.xdist_group("recorded stages")  # they share runs

MODEL, LAYERS = language_model(6)
CODEC = js.codecs.bfloat16(error_feedback=True)
PLACES = {
    "none": None,
    "interleaved": ("interleaved", 2),
    "zbv": ("zbv", 2),
    "four": ("one_f_one_b", 4),
}


def slowmo(**options):
    base = js.local_sgd("replica", sync_every=2)
    return js.slowmo("replica", base=base, sync_every=4, momentum=0.6, **options)


SYNCS = {
    "slowmo": slowmo,
    "whole": lambda: slowmo(shard_state=False),
    "sgp": lambda: js.sgp("replica", overlap=2),  # messages are in flight
    "coded": lambda: js.local_sgd("replica", codec=CODEC),
}


def constants():
    """Return a transform that keeps what is of no parameter, as Muon keeps its coefficients."""
    return optax.GradientTransformation(
        lambda params: {"coefficients": jax.numpy.arange(3.0)},
        lambda updates, state, params=None: (updates, state),
    )


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "constants": lambda: optax.chain(constants(), optax.sgd(1e-2, momentum=0.9)),
}


def schedule_of(place):
    kind, stages = PLACES[place]
    return js.schedules.by_name(kind, stages, 4, 2 if kind in ("interleaved", "zbv") else None)


class Staged(Run):
    """A step of the language model on some stages, or on none."""

    def __init__(self, place, how, mesh_of, *, replicas=2, model=MODEL, layers=LAYERS, **options):
        sync, _, optimizer = how.partition(", ")
        self.params, self.unstack = layers, lambda tree: tree
        loss_fn = model
        mesh = mesh_of({"replica": replicas})
        if PLACES[place] is not None:
            schedule = schedule_of(place)
            mesh = mesh_of({"replica": replicas, "stage": schedule.num_stages})
            self.pipe = loss_fn = js.pipelined(model, layers, schedule, mesh=mesh)
            self.unstack = loss_fn.layout.unstack_like
        options = {"sync": SYNCS[sync]()} if sync else options
        tx = OPTIMIZERS[optimizer or "adamw"]()
        self.step = js.make_train_step(loss_fn, tx, mesh=mesh, **options)

    def trained(self, state, start, end):
        for t in range(start, end):
            state, _ = self.step(state, tokens(16, t))
        return state

    def values(self, state):
        """Return the state with the model's trees."""
        return self.unstack(on_host(state))


@pytest.fixture(scope="module")
def saved(mesh_of, tmp_path_factory):
    return once_saved(lambda place, how: Staged(place, how, mesh_of), tmp_path_factory)


MOVES = [
    *((old, new, sync, "adafactor") for old in PLACES for new in PLACES for sync in SYNCS),
    ("interleaved", "zbv", "slowmo", "adamw"),
    ("interleaved", "zbv", "whole", "adamw"),
    ("interleaved", "zbv", "whole", "constants"),
    ("none", "zbv", "sgp", "adamw"),
    ("interleaved", "zbv", "coded", "adamw"),
]
USUAL = [
    ("interleaved", "zbv", "slowmo", "adamw"),
    ("interleaved", "zbv", "whole", "adamw"),
    ("interleaved", "none", "slowmo", "adafactor"),
    ("none", "zbv", "sgp", "adamw"),
    ("interleaved", "zbv", "coded", "adamw"),
]


@pytest.mark.parametrize(
    ("old", "new", "sync", "optimizer"),
    sweep([case for case in MOVES if case[0] != case[1]], lambda *case: case in USUAL),
)
def test_a_run_goes_on_with_the_layers_that_it_had(old, new, sync, optimizer, saved, mesh_of):
    how = f"{sync}, {optimizer}"
    then_run, folder, then, end = saved(old, how)
    run = Staged(new, how, mesh_of)
    found = Checkpoints(folder).restore(run.step, LAYERS)
    assert found.is_exact
    assert len(found.notes) == 1
    jax.tree.map(np.testing.assert_array_equal, run.values(found.state), then)
    last = run.unstack(on_host(run.trained(found.state, SAVED, LAST).params))
    # Sums in another order may be rounded to the next bfloat16.
    tolerance = 1e-3 if sync == "coded" else 1e-5
    assert_close(last, then_run.unstack(on_host(end.params)), tolerance)


HOW = "slowmo, adamw"


def test_notes_say_from_which_stages_to_which_and_equal_ones_restore_every_bit(saved, mesh_of):
    _, folder, then, _ = saved("interleaved", HOW)
    ways = {"zbv": "other places on the 2 stages", "four": "from 2 stages to 4 stages"}
    for place, way in ways.items():
        (note,) = Checkpoints(folder).restore(Staged(place, HOW, mesh_of).step, LAYERS).notes
        assert way in note
    run = Staged("interleaved", HOW, mesh_of)
    for params in (LAYERS, run.pipe.layout.stack(LAYERS)):
        found = Checkpoints(folder).restore(run.step, params)
        assert (found.is_exact, found.notes) == (True, ())
        assert leaf_bytes(run.values(found.state)) == leaf_bytes(then)


@pytest.mark.parametrize("place", ["interleaved", "zbv"])
def test_on_other_replicas_too(place, saved, mesh_of):
    _, folder, then, _ = saved("interleaved", HOW)
    run = Staged(place, HOW, mesh_of, replicas=4)
    found = Checkpoints(folder).restore(run.step, LAYERS)
    assert not found.is_exact
    # That of the replicas is all that there is to say where the stages are equal.
    assert found.notes[0].startswith("Parameters" if place == "zbv" else "4 replicas start")
    now = run.values(found.state)
    jax.tree.map(np.testing.assert_array_equal, now.exchange.shared, then.exchange.shared)
    for a, b in zip(jax.tree.leaves(now.params), jax.tree.leaves(then.params), strict=True):
        np.testing.assert_allclose(a[3], b.mean(0), rtol=1e-6, atol=1e-7)


def renamed(layer):
    """Return the model with another name for an array of a layer."""

    def block(params, x):
        return MODEL.layers[layer]({**params, "up": params["rise"]}, x)

    own = {"rise" if name == "up" else name: x for name, x in LAYERS[layer].items()}
    functions = [*MODEL.layers[:layer], block, *MODEL.layers[layer + 1 :]]
    model = js.LayeredModel(functions, MODEL.loss, tied=MODEL.tied)
    return model, [*LAYERS[:layer], own, *LAYERS[layer + 1 :]]


@pytest.mark.parametrize(
    ("make", "place", "how", "words"),
    [
        (lambda: renamed(3), "zbv", HOW, r"params/3/rise is missing .* float32\[4,6"),
        (lambda: renamed(3), "none", HOW, r"params/3/up is float32\[4,6\] .* missing"),
        (lambda: language_model(5), "zbv", HOW, "params/6/table is missing"),
        (lambda: (js.LayeredModel(MODEL.layers, MODEL.loss), LAYERS), "zbv", HOW, "'7/table'"),
        (lambda: (MODEL, LAYERS), "zbv", "slowmo, adafactor", "opt_state/0/v_row/0/table"),
    ],
)
def test_another_model_or_optimizer_is_refused_by_names(make, place, how, words, saved, mesh_of):
    _, folder, *_ = saved("interleaved", HOW)
    model, layers = make()
    run = Staged(place, how, mesh_of, model=model, layers=layers)
    with pytest.raises(CheckpointError, match=words):
        Checkpoints(folder).restore(run.step, layers)


@pytest.mark.parametrize(("old", "new"), [("zbv", "interleaved"), ("none", "zbv")])
def test_what_is_of_no_parameter_is_refused(old, new, mesh_of, tmp_path):
    """A bucket of error feedback holds what several leaves have lost."""
    hook = js.hooks.int8(error_feedback=True)
    gradients = js.all_reduce_gradients("replica", hook=hook)
    old_run, run = (Staged(x, "", mesh_of, gradients=gradients) for x in (old, new))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, old_run.step.init(LAYERS), wait=True)
        with pytest.raises(CheckpointError, match="exchange/gradients/hook/0"):
            checkpoints.restore(run.step, LAYERS)


def test_a_parameter_may_have_had_another_name(saved, mesh_of):
    """With it go its moments, anchor and momentum; names that the checkpoint has stay."""
    _, folder, then, _ = saved("interleaved", HOW)
    model, layers = renamed(3)
    run = Staged("none", HOW, mesh_of, model=model, layers=layers)
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
