"""The page "Outer steps that hide": recorded runs of other libraries, by the code that it shows."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from recipes.doc_blocks import run

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "tests/golden/peers"
EXCHANGE = runpy.run_path(str(ROOT / "examples/maxtext/exchange.py"))["exchange"]
TORCHFT = json.loads((PEERS / "torchft_streaming.json").read_text())["cases"]
with np.load(PEERS / "maxtext_diloco.npz") as file:
    MAXTEXT = dict(file)
MAXTEXT_CASES = json.loads(str(MAXTEXT["meta"]))

pytestmark = pytest.mark.xdist_group("outer")  # one process runs the page


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    return run("outer", "Begin with this", "Coming from MaxText or torchft")


@pytest.mark.parametrize("number", range(len(TORCHFT)))
def test_torchft(page, number):
    case = TORCHFT[number]
    tx = page["like_torchft"](
        sync_every=case["sync_every"],
        outer_optimizer=optax.sgd(case["outer_learning_rate"]),
        fragments=case["fragments"],
        fragment_sync_delay=case["delay"],
        fragment_update_alpha=case["alpha"],
        shard_state=number % 2 == 0,
    )
    params = {name: jnp.full((2, 1), case["start"]) for name in "ab"}
    state = jax.vmap(tx.init, axis_name="replica")(params)
    update = jax.jit(jax.vmap(tx.update, axis_name="replica"))
    move = -case["inner_learning_rate"] * case["gradient"]
    for t in range(1, len(case["local"])):
        u, state = update(jax.tree.map(lambda x: jnp.full_like(x, move), params), state, params)
        params = optax.apply_updates(params, u)
        for replica in range(2):
            assert [float(params[name][replica, 0]) for name in "ab"] == case["local"][str(t)]
        if str(t) in case["global"]:
            whole = jax.vmap(tx.anchor, axis_name="replica")(state, params)
            assert [float(whole[name][0, 0]) for name in "ab"] == case["global"][str(t)]


def maxtext_loss(params: dict[str, Any], x: jax.Array, y: jax.Array) -> jax.Array:
    h = x @ params["embed"]
    for w in params["model"]["layers"]["w"]:
        h = jnp.tanh(h @ w)
    return jnp.mean((h @ params["out"] - y) ** 2)


def maxtext_run(sync: js.ParameterTransform, updates: int) -> tuple[np.ndarray, Any]:
    """Each replica's losses, `[update, replica]`, and the anchor; data end with the last again."""
    start = {name: MAXTEXT[f"start/{name}"] for name in ("embed", "out")}
    start["model"] = {"layers": {"w": MAXTEXT["start/layers/w"]}}
    tx = js.chain(optax.adam(1e-2), sync)
    params = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), start)
    state = jax.vmap(tx.init, axis_name="diloco")(params)

    def update(params, state, x, y):
        loss, grads = jax.value_and_grad(maxtext_loss)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    step, losses = jax.jit(jax.vmap(update, axis_name="diloco")), []
    for t in np.minimum(np.arange(updates), len(MAXTEXT["x"]) - 1):
        params, state, loss = step(params, state, MAXTEXT["x"][t], MAXTEXT["y"][t])
        losses.append(loss)
    anchor = jax.vmap(sync.anchor, axis_name="diloco")(state[-1], params)
    return np.asarray(losses), {"layers/w": anchor.pop("model")["layers"]["w"], **anchor}


@pytest.mark.parametrize("number", range(len(MAXTEXT_CASES)))
def test_maxtext(number):
    case = MAXTEXT_CASES[number]
    config = SimpleNamespace(
        diloco_sync_period=case["period"],
        diloco_outer_lr=case["outer_lr"],
        diloco_outer_momentum=case["momentum"],
        num_diloco_fragments=case["fragments"] if case["fragments"] > 1 else None,
        num_communication_overlapping_steps=case["delay"],
        communication_overlapping_alpha=case["alpha"],
        param_scan_axis=0,
        use_sequential_layers=False,
    )
    sync = EXCHANGE(config)
    expected = MAXTEXT[f"case{number}/losses"]
    losses, _ = maxtext_run(sync, len(expected))
    np.testing.assert_allclose(losses, expected, rtol=1e-6, atol=1e-6)
    # What is in flight after update 30 has been stepped there, and will be here.
    _, anchor = maxtext_run(sync, len(expected) + max(0, case["delay"] - 2))
    for name, leaf in anchor.items():
        np.testing.assert_allclose(leaf[0], MAXTEXT[f"case{number}/outer/{name}"], atol=1e-6)
