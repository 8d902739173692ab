"""FairScale's float16 runs with a float32 master: `js.codecs.float16(error_feedback=True)`.

The recorded module is in float16, and the optimizer steps a flat float32 copy of it. Ours has the
copy alone, of which the module is what float16 makes of it.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js
from support.executions import lift, one_step
from support.golden_fairscale import HALF, GoldenRun

CODEC = js.codecs.float16(error_feedback=True)
SLOW = [name for name in HALF if "slowmo" in name]


def tolerance(name: str) -> float:
    """Of the recording: it depends on the order of sums in half precision."""
    return 2e-3 if "sgp" in name else 2.5e-2


def flat(tree) -> np.ndarray:
    return np.concatenate([np.asarray(tree[k]).reshape(4, -1) for k in sorted(tree)], axis=1)


def first_anchor(golden: GoldenRun, params):
    """What FairScale anchors slow momentum at unless told: parameters after the first inner step.

    With memory-efficient state element j is that of the rank that keeps it.
    """
    if not golden.config["constructor_args"]["slowmo_memory_efficient"]:
        return params
    whole = flat(params)
    owner = np.arange(whole.shape[1]) // -(-whole.shape[1] // 4)
    ours, start = {}, 0
    mixed = whole[owner, np.arange(whole.shape[1])]
    for key in sorted(params):
        shape = params[key].shape[1:]
        stop = start + int(np.prod(shape))
        ours[key] = jnp.broadcast_to(mixed[start:stop].reshape(shape), (4, *shape))
        start = stop
    return ours


def trajectory(golden: GoldenRun, sync, execution: str):
    """Stacked float32 parameters after every step."""
    tx, axes = golden.chain(sync), golden.axes
    params = {k: jnp.asarray(v, jnp.float32) for k, v in golden.initial().items()}
    state = lift(tx.init, axes, execution, (False,))(params)
    step = lift(one_step(tx), axes, execution, (False,) * 3)
    found = []
    for t in range(golden.config["steps"]):
        grads = {k: jnp.asarray(v[t], jnp.float32) for k, v in golden.tree("grads").items()}
        params, state = step(params, state, grads)
        if t == 0 and golden.config["effective"]["slowmo"]:
            inner, outer = state
            state = inner, outer._replace(anchor=first_anchor(golden, params))
        found.append(params)
    return found


@pytest.mark.parametrize("execution", ["vmap", "shard_map"])
@pytest.mark.parametrize("name", HALF)
def test_trajectory(name, execution):
    golden = GoldenRun.load(name)
    # Slow steps exchange float32, as FairScale's do; whole, so that the test can set their anchor.
    whole = {"shard_state": False} if name in SLOW else {}
    history = trajectory(golden, golden.sync(CODEC, **whole), execution)
    near = {"rtol": 0, "atol": tolerance(name)}
    masters = np.stack([flat(step) for step in history])
    np.testing.assert_allclose(masters, golden.arrays["fp32_flat"], **near)
    for key, recorded in golden.tree("params").items():
        ours = np.stack([np.asarray(step[key]).astype(np.float16) for step in history])
        np.testing.assert_allclose(np.float32(ours), np.float32(recorded), **near, err_msg=key)
