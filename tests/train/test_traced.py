"""Programs that were traced to be read are those that run: nothing is traced twice."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js

PARAMS = {"w": np.ones((8, 3), np.float32)}
BATCH = np.ones((32, 8), np.float32)


@pytest.mark.parametrize(("mode", "programs"), [("host", 3), ("traced", 1)])
@pytest.mark.parametrize("shapes_alone", [False, True])
def test_steps_run_what_was_traced(mode, programs, shapes_alone):
    traces = 0

    def loss(params, batch):
        nonlocal traces
        traces += 1
        return jnp.mean((batch @ params["w"]) ** 2)

    base = js.local_sgd("replica", sync_every=2)
    step = js.make_train_step(
        loss,
        optax.sgd(0.1),
        sync=js.slowmo("replica", base=base, sync_every=4),
        mesh=js.make_mesh({"replica": 4}),
        mode=mode,
    )
    state = step.init(PARAMS)
    found = (state, BATCH)
    if shapes_alone:
        found = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)),
            found,
        )
    assert len(step.traced_by_phase(*found)) == programs
    assert traces == programs
    for _ in range(4):
        state, _ = step(state, BATCH)
    assert traces == programs
