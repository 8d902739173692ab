"""A run that was saved with other stages, or with none, goes on as if it had not been moved."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from checkpoint.moves import LAST, SAVED, WIDTH, Run, once_saved
from checkpoint.runs import on_host
from jaxslowmo.checkpoint import CheckpointError, Checkpoints, SavedForm
from jaxslowmo.pipeline.model import model_blocks
from support.exhaustive import sweep

pytestmark = pytest.mark.xdist_group("saved stages")  # they share runs

RANDOM = np.random.default_rng(0)
BLOCKS = 4


def affine(params, x):
    return jax.numpy.tanh(x @ params["kernel"] + params["bias"])


LAYERS = [
    {
        "bias": RANDOM.normal(size=WIDTH).astype(np.float32),
        "kernel": 0.4 * RANDOM.normal(size=(WIDTH, WIDTH)).astype(np.float32),
    }
    for _ in range(BLOCKS)
]
MODEL = js.LayeredModel(
    [affine] * BLOCKS,
    lambda out, batch: ((out - batch) ** 2).mean(),
    tied=[((0, "bias"), (BLOCKS - 1, "bias"))],
)
LAYERS[-1]["bias"] = LAYERS[0]["bias"]
# Of the mesh beside two replicas.
STAGES = {
    "none": {},
    "two": {"stage": 2},
    "four": {"stage": 4},
    "two of two": {"stage": 2, "fsdp": 2},
}
SYNCS = {
    "slowmo": lambda specs: js.slowmo(
        "replica",
        base=js.local_sgd("replica", sync_every=2),
        sync_every=4,
        momentum=0.6,
        param_specs=specs,
    ),
    "diloco": lambda specs: js.diloco("replica", sync_every=2, param_specs=specs),
    "sgp": lambda specs: js.sgp("replica", overlap=2),
    "whole": lambda specs: js.diloco("replica", sync_every=2, shard_state=False),
}


class Staged(Run):
    """A step on some stages. Its loss is the whole model's: how they are computed is not asked."""

    def __init__(self, stages, sync, mesh_of):
        inner = STAGES[stages]
        mesh = mesh_of({"replica": 2, **inner})
        self.stack = self.unstack = lambda tree: tree
        specs, self.params = None, LAYERS
        if inner:
            blocks = model_blocks(BLOCKS, inner["stage"])
            inside = {"bias": P(), "kernel": P(None, "fsdp") if "fsdp" in inner else P()}
            layout = js.pipeline.StageLayout(
                MODEL,
                LAYERS,
                blocks,
                tuple(range(inner["stage"])),
                mesh=mesh,
                param_specs=[inside] * BLOCKS,
            )
            self.stack, self.unstack, specs = layout.stack_like, layout.unstack, layout.specs
            self.params = layout.stack(LAYERS)
        self.step = js.make_train_step(
            self.loss,
            optax.adam(1e-2),
            sync=SYNCS[sync](specs),
            mesh=mesh,
        )

    def loss(self, params, x):
        return MODEL(self.unstack(params), x)

    def form(self, new):
        return SavedForm(
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.params),
            lambda tree: new.stack(self.unstack(tree)),
        )

    def values(self, state):
        """Parameters, moments and anchor, one tree per layer."""
        moments, own = state.opt_state[1][0], state.opt_state[-1]
        found = [state.params, moments.mu, moments.nu]
        if self.step.sync.anchor is not None:
            momentum = getattr(own.outer, "velocity", None) or own.outer[0].trace
            found += [
                js.read_anchor(
                    self.step.sync, own._replace(anchor=x), state.params, mesh=self.step.mesh
                )
                for x in (own.anchor, momentum)
            ]
        return [MODEL.as_one(self.unstack(on_host(tree))) for tree in found]


@pytest.fixture(scope="module")
def saved(mesh_of, tmp_path_factory):
    return once_saved(lambda stages, sync: Staged(stages, sync, mesh_of), tmp_path_factory)


MOVES = [(old, new, sync) for old in STAGES for new in STAGES for sync in SYNCS if old != new]
USUAL = [("two", "four", "slowmo"), ("none", "two", "diloco")]


@pytest.mark.parametrize(
    ("old", "new", "sync"), sweep(MOVES, lambda old, new, sync: (old, new, sync) in USUAL)
)
def test_a_run_goes_on_with_other_stages(old, new, sync, saved, mesh_of):
    then_run, folder, then, end = saved(old, sync)
    run = Staged(new, sync, mesh_of)
    for form in (None, then_run.form(run)):  # as the record says, and as the caller does
        found = Checkpoints(folder).restore(run.step, run.params, saved_form=form)
        assert found.is_exact
        jax.tree.map(np.testing.assert_array_equal, run.values(found.state), then)
    if len(then) > 3:
        assert np.ptp(then[-1][0]["kernel"]) > 0  # there is momentum to lose
    last = run.values(run.trained(found.state, SAVED, LAST))[0]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        last,
        then_run.values(end)[0],
    )


def test_on_other_replicas_too(saved, mesh_of):
    then_run, folder, then, _ = saved("two", "slowmo")
    run = Staged("none", "slowmo", mesh_of)
    sync = SYNCS["slowmo"](None)
    mesh = js.virtual_mesh({"replica": 3})
    run.step = js.make_train_step(MODEL, optax.adam(1e-2), sync=sync, mesh=mesh)
    found = Checkpoints(folder).restore(run.step, LAYERS, saved_form=then_run.form(run))
    assert "3 replicas start from the consensus of 2" in found.notes[0]
    now = run.values(found.state)
    for part in (3, 4):  # anchor and momentum, exactly
        for a, b in zip(jax.tree.leaves(now[part]), jax.tree.leaves(then[part]), strict=True):
            np.testing.assert_array_equal(a[2], b[1])


def test_what_nobody_can_tell_apart_is_refused(mesh_of, tmp_path):
    """A bucket of error feedback holds what several leaves have lost."""
    hook = js.hooks.int8(error_feedback=True)
    gradients = js.all_reduce_gradients("replica", hook=hook)
    run, other = (Staged(stages, "whole", mesh_of) for stages in ("none", "two"))
    for one in (run, other):
        one.step = js.make_train_step(
            one.loss, optax.sgd(0.1), gradients=gradients, mesh=one.step.mesh
        )
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, run.step.init(run.params), wait=True)
        with pytest.raises(CheckpointError, match=r"cannot be distinguished.*: 0/hook/0 \[288\]"):
            checkpoints.restore(other.step, other.params, saved_form=run.form(other))
