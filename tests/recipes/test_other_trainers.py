"""The page "In other trainers": each library's program, and what few changed lines make of it."""

import difflib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js
from jaxslowmo.checkpoint import Checkpoints, export_consensus, load_consensus
from recipes.doc_blocks import fresh, run, sections

PAGE, SETTING = "other-trainers", "Setting"
LIBRARIES = ["flax linen", "flax nnx", "Equinox", "Keras"]
REPLICAS, UPDATES = 4, 8

pytestmark = pytest.mark.xdist_group("other trainers")  # one process runs the page


def program(title: str, name: str, changes: dict[str, str]) -> str:
    """The program before or after, with other texts, which collects its losses."""
    text = sections(PAGE)[title][name == "after"]
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return f"losses = []\n{text}    losses.append(loss)\n"


def trained(
    title: str, name: str = "after", changes: dict[str, str] | None = None, **names: Any
) -> dict[str, Any]:
    """The names that a program leaves after a few updates, its settings replaced by `names`."""
    names = fresh(PAGE, SETTING) | names
    names["batches"] = names["batches"][:UPDATES]
    text = program(title, name, changes or {})
    exec(compile(text, f"{PAGE}: {title}, {name}", "exec"), names)
    return names


def assert_close(tree: Any, expected: Any, tolerance: float = 1e-4) -> None:
    for x, y in zip(*map(jax.tree.leaves, jax.device_get((tree, expected))), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def leaves(names: dict[str, Any]) -> list[Any]:
    """Losses and consensus of a run."""
    replicas, step = names["replicas"], names["step"]
    return [np.stack(names["losses"]), *jax.tree.leaves(step.consensus(replicas))]


@pytest.mark.parametrize("title", LIBRARIES)
def test_at_most_15_lines_change(title):
    before, after, *_ = (block.splitlines() for block in sections(PAGE)[title])
    marks = [line[0] for line in difflib.ndiff(before, after)]
    assert 0 < marks.count("+") <= 15
    assert 0 < marks.count("-") <= 4


@pytest.mark.parametrize("title", LIBRARIES)
def test_the_consensus_has_learnt(title):
    names = run(PAGE, SETTING, title)
    predicted = np.reshape(names["predicted"], -1)
    assert np.mean((predicted - names["y"][0]) ** 2) < 0.05 * np.var(names["y"][0])


MESHES = {
    "virtual": lambda: js.virtual_mesh({"replica": REPLICAS}),
    "two on each device": lambda: js.virtual_mesh({"replica": REPLICAS}, jax.devices()[:2]),
    "devices": lambda: js.make_mesh({"replica": REPLICAS}),
    "two devices each": lambda: js.make_mesh({"replica": REPLICAS, "fsdp": 2}),
}
SYNCS = {
    "diloco": lambda: js.diloco("replica", sync_every=4),
    "slowmo": lambda: js.slowmo(
        "replica", base=js.local_sgd("replica", sync_every=2), sync_every=6
    ),
}


# Adam with its small default makes steps of what is rounding in the gradient of a dead unit.
STABLE = {
    title: {"Adam(0.05)": "Adam(0.05, epsilon=1e-3)"}
    if title == "Keras"
    else {"adam(0.05)": "adam(0.05, eps=1e-3)"}
    for title in LIBRARIES
}


@functools.cache
def on_virtual_replicas(title, sync):
    return leaves(trained(title, changes=STABLE[title], sync=SYNCS[sync]()))


@pytest.mark.parametrize(
    ("mesh", "mode", "map_with", "sync"),
    [
        ("devices", "traced", "shard_map", "diloco"),
        ("two on each device", "host", "vmap", "diloco"),
        ("two devices each", "host", "shard_map", "slowmo"),
    ],
)
@pytest.mark.parametrize("title", LIBRARIES)
def test_replicas_train_alike_wherever_they_run(title, mesh, mode, map_with, sync, monkeypatch):
    """So does a scan of their updates. Masks of dropout are those of the replica's number."""
    options = {"mode": mode, "map_with": map_with}
    monkeypatch.setattr(js, "with_exchange", functools.partial(js.with_exchange, **options))
    names = trained(title, changes=STABLE[title], mesh=MESHES[mesh](), sync=SYNCS[sync]())
    expected = on_virtual_replicas(title, sync)
    assert_close(leaves(names), expected)
    step = names["step"]
    batches = jax.tree.map(lambda *x: np.stack(x), *names["batches"])
    names["replicas"], names["losses"] = step.scan(step.init(names["state"]), batches)
    assert_close(leaves(names), expected)


NO_DROPOUT = {
    "flax linen": {"nn.Dropout(0.1": "nn.Dropout(0.0"},
    "flax nnx": {"nnx.Dropout(0.1": "nnx.Dropout(0.0"},
    "Equinox": {"nn.Dropout(0.1": "nn.Dropout(0.0"},
    "Keras": {"layers.Dropout(0.1": "layers.Dropout(0.0"},
}


@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize("title", LIBRARIES)
def test_replicas_draw_masks_of_their_own(title, drops):
    """On the same examples their losses differ by them alone."""
    x, y = fresh(PAGE, SETTING)["batches"][0]
    same = np.concatenate([x[:16]] * REPLICAS), np.concatenate([y[:16]] * REPLICAS)
    changes = {} if drops else NO_DROPOUT[title]
    losses = trained(title, changes=changes | {"in batches:": "in [batch]:"}, batch=same)["losses"]
    assert len(np.unique(losses[0])) == (REPLICAS if drops else 1)


# What the step of each library becomes where it averages gradients, and what makes its BatchNorm
# that of the whole batch.
REDUCES = {
    "flax linen": {
        "def train_step(state, batch)": "def train_step(state, batch, reduce_gradients)",
        "grads=grads": "grads=reduce_gradients(grads)",
        "momentum=0.9": 'momentum=0.9, axis_name="replica"',
    },
    "flax nnx": {
        "def of_replica(state, batch)": "def of_replica(state, batch, reduce_gradients)",
        "def train_step(model, optimizer, batch)": (
            "def train_step(model, optimizer, batch, reduce_gradients)"
        ),
        "train_step(model, optimizer, batch)\n": (
            "train_step(model, optimizer, batch, reduce_gradients)\n"
        ),
        "update(model, grads)": "update(model, reduce_gradients(grads))",
        "momentum=0.9": 'momentum=0.9, axis_name="replica"',
    },
    "Equinox": {
        "def of_replica(state, batch)": "def of_replica(state, batch, reduce_gradients)",
        "key, batch):": "key, batch, reduce_gradients):",
        "*state[1:], batch)": "*state[1:], batch, reduce_gradients)",
        "tx.update(grads,": "tx.update(reduce_gradients(grads),",
        'axis_name="batch", mode': 'axis_name=("batch", "replica"), mode',
    },
    "Keras": {
        "def of_replica(state, batch)": "def of_replica(state, batch, reduce_gradients)",
        "def train_step(state, batch)": "def train_step(state, batch, reduce_gradients)",
        "tree.map(raw, state), batch)": "tree.map(raw, state), batch, reduce_gradients)",
        "optimizer_variables, grads,": "optimizer_variables, reduce_gradients(grads),",
    },
}


@pytest.mark.parametrize("mesh", ["virtual", "devices"])
@pytest.mark.parametrize("title", LIBRARIES)
def test_with_averaged_gradients_losses_are_those_of_the_whole_batch(title, mesh, monkeypatch):
    alike = dict(NO_DROPOUT[title])
    if title == "Keras":
        alike["        keras.layers.BatchNormalization(momentum=0.9),\n"] = ""
    expected = trained(title, "before", alike)["losses"]
    reduction = js.all_reduce_gradients("replica")
    monkeypatch.setattr(
        js, "with_exchange", functools.partial(js.with_exchange, gradients=reduction)
    )
    never = js.local_sgd("replica", sync_every=10**6)
    names = trained(title, changes=alike | REDUCES[title], mesh=MESHES[mesh](), sync=never)
    assert_close(np.mean(names["losses"], axis=1), np.stack(expected), 1e-3)


@pytest.mark.parametrize("title", LIBRARIES)
def test_a_restored_run_goes_on_to_the_bit_or_from_the_consensus(title, tmp_path):
    names = trained(title)
    step, replicas, batch = names["step"], names["replicas"], names["batches"][0]
    consensus = step.consensus(replicas)
    others = trained(title, mesh=js.virtual_mesh({"replica": 2}))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(UPDATES, replicas, wait=True)
        again = checkpoints.restore(step, names["state"])
        fewer = checkpoints.restore(others["step"], others["state"])
    assert again.is_exact
    assert_close(others["step"].consensus(fewer.state), consensus, 1e-6)
    others["step"](fewer.state, batch)
    export_consensus(tmp_path / "model", step.as_train_state(replicas).params, mesh=step.mesh)
    assert_close(load_consensus(tmp_path / "model", like=consensus), consensus, 1e-6)
    ends = [step(state, batch) for state in (replicas, again.state)]
    for x, y in zip(*map(jax.tree.leaves, ends), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("title", LIBRARIES)
def test_moments_in_the_form_of_optax_are_averaged_and_others_refused(title, monkeypatch):
    def put(state, new):
        if title == "flax linen":
            return state.replace(opt_state=new)
        return type(state)([*state[:2], new, *state[3:]])

    def get(state):
        return state.opt_state if title == "flax linen" else state[2]

    given = {"get_opt_state": get, "set_opt_state": put}
    monkeypatch.setattr(js, "with_exchange", functools.partial(js.with_exchange, **given))
    sync = js.local_sgd("replica", sync_every=UPDATES, inner_state="average")
    if title in ("flax nnx", "Keras"):
        with pytest.raises(ValueError, match="`inner_state` changes"):
            trained(title, sync=sync)
        return
    moments = get(trained(title, sync=sync)["replicas"].state)[0]
    for leaf in map(np.asarray, jax.tree.leaves((moments.mu, moments.nu))):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))
        assert np.any(leaf)
