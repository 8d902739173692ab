"""Replicas with different amounts of data: the weights that the loop gives, and equal ones.

`test_two_processes.py` and `input/test_accumulate.py` train with them.
"""

import jax.numpy as jnp
import numpy as np
import optax

import jaxslowmo as js


def test_equal_weights_are_none_and_a_replica_may_have_no_batch():
    mesh = js.virtual_mesh({"replica": 2})
    ((batch, weight),) = js.uneven_batches([[], [np.ones((2, 3))]], mesh=mesh)
    assert batch.shape == (4, 3)
    assert weight.tolist() == [0, 2]
    mean = js.all_reduce_gradients("replica")
    loss = lambda params, batch: jnp.mean((batch @ params["w"] - 1) ** 2)  # noqa: E731
    step = js.make_train_step(loss, optax.sgd(0.1), gradients=mean, mesh=mesh)
    batch, start = np.random.default_rng(0).normal(size=(4, 3)), {"w": np.ones(3, np.float32)}
    ends = [step(step.init(start), np.float32(batch), w)[0] for w in (None, [7, 7])]
    np.testing.assert_allclose(ends[0].params["w"], ends[1].params["w"], rtol=1e-6)
