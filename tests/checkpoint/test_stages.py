"""A checkpoint records where the layers of a pipeline lie: other stages restore what they hold."""

import jax
import numpy as np
import optax
import pytest

import jaxslowmo as js
from checkpoint.moves import LAST, SAVED, Run, once_saved
from checkpoint.runs import leaf_bytes, on_host
from jaxslowmo.checkpoint import CheckpointError, Checkpoints, SavedForm
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

    def form(self, new):
        """Return the form of the parameters here, for a restore in another place."""
        types = jax.eval_shape(lambda: self.params)
        if hasattr(self, "pipe"):
            types = self.pipe.layout.types
        stack = new.pipe.layout.stack_like if hasattr(new, "pipe") else lambda tree: tree
        return SavedForm(types, lambda tree: stack(self.unstack(tree)))

    def values(self, state):
        """Return all that is no shard, and the whole anchor and momentum."""
        sync, own = self.step.sync, state.opt_state[-1]
        if sync is not None and sync.algorithm.is_sharded:  # blocks of buffers are no buffers
            rest = state._replace(opt_state=(*state.opt_state[:-1], own._replace(shared=())))
        else:
            rest = state
        host = self.unstack(on_host(rest))
        if sync is None or not sync.algorithm.has_anchor:
            return host
        slow = [
            js.read_anchor(
                sync,
                own._replace(shared=own.shared | {"anchor": x}),
                state.params,
                mesh=self.step.mesh,
            )
            for x in (own.shared["anchor"], own.shared["outer"].velocity)
        ]
        local = host.opt_state[-1].local
        return host._replace(opt_state=(*host.opt_state[:-1], local, self.unstack(on_host(slow))))


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
    # As the record says, and, where all that moves has the form of the parameters, as the caller.
    forms = [None, then_run.form(run)] if optimizer == "adamw" else [None]
    for form in forms:
        found = Checkpoints(folder).restore(run.step, LAYERS, saved_form=form)
        assert found.is_exact
        assert len(found.notes) == (form is None)
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


@pytest.mark.parametrize(
    ("place", "given"), [("interleaved", False), ("zbv", False), ("zbv", True)]
)
def test_on_other_replicas_too(place, given, saved, mesh_of):
    then_run, folder, then, _ = saved("interleaved", HOW)
    run = Staged(place, HOW, mesh_of, replicas=4)
    form = (lambda extra: then_run.form(run)) if given else None
    found = Checkpoints(folder).restore(run.step, LAYERS, saved_form=form)
    assert not found.is_exact
    # That of the replicas is all that there is to say where the stages are equal.
    is_moved = place == "zbv" and not given
    assert found.notes[0].startswith("Parameters" if is_moved else "4 replicas start")
    now = run.values(found.state)
    for a, b in zip(*(jax.tree.leaves(x.opt_state[-1]) for x in (now, then)), strict=True):
        np.testing.assert_array_equal(a[3], b[1])  # anchor and momentum
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
        (lambda: (MODEL, LAYERS), "zbv", "slowmo, adafactor", "opt_state/1/0/v_row/0/table"),
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
    then_run, run = (Staged(x, "", mesh_of, gradients=gradients) for x in (old, new))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, then_run.step.init(LAYERS), wait=True)
        for form, name in ((None, "opt_state/0/hook/0"), (then_run.form(run), "hook/0")):
            with pytest.raises(CheckpointError, match=name):
                checkpoints.restore(run.step, LAYERS, saved_form=form)


def test_a_saved_form_of_other_stages_is_refused(saved, mesh_of):
    """It would swap layers: the buffers of both have the same names and shapes."""
    _, folder, *_ = saved("interleaved", HOW)
    run = Staged("zbv", HOW, mesh_of)
    wrong = SavedForm(run.pipe.layout.types, lambda tree: tree)
    with pytest.raises(CheckpointError, match="`saved_form`"):
        Checkpoints(folder).restore(run.step, LAYERS, saved_form=wrong)
