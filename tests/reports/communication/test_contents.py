"""What the bytes of a training step are; `algorithms/test_communication.py` has exchanges."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxslowmo as js

ITEM, SHAPES = 4, [(48, 257), (12, 99), (5,)]
STATISTICS = ITEM * 6


def loss(params, batch, *, model_state):
    total = sum(jnp.sum(p) for p in params)
    mean = {"mean": model_state["mean"] + jnp.mean(batch), "count": model_state["count"] + 1}
    return total * jnp.mean(batch), ({"total": total}, mean)


def test_gradients_statistics_and_metrics_have_their_names():
    """Between replicas, and inside of them, where metrics are averaged, too."""
    both = js.all_reduce_gradients(("replica", "device"))
    mesh, found = js.make_mesh({"replica": 2, "device": 2}), {}
    step = js.make_train_step(loss, optax.adam(0.1), mesh=mesh, mode="host", gradients=both)
    params = [np.zeros(s, np.float32) for s in SHAPES]
    start = {"mean": np.zeros(6, np.float32), "count": np.int32(0)}
    state = jax.eval_shape(lambda: step.init(params, model_state=start))
    report = js.comm_report(step, state, jax.ShapeDtypeStruct((4, 3), jnp.float32))
    for row in report.select(level="emitted"):
        key = row.axis, row.content
        found[key] = found.get(key, 0) + row.bytes
    # The loss and one metric; of statistics also the counter.
    assert found == {
        ("replica,device", "gradients"): ITEM * sum(map(np.size, params)),
        ("replica", "statistics"): STATISTICS,
        ("device", "statistics"): STATISTICS + ITEM,
        ("device", "metrics"): ITEM * 2,
    }
