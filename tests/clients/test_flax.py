"""A training program in the way of flax's examples, for one device, moved to replicas.

A convolution, BatchNorm and Dropout, whose variables are of four kinds: what is trained,
statistics, keys, and counters.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxslowmo as js

RNG = np.random.default_rng(0)
LABELS = RNG.integers(4, size=(13, 32))
# A bright quarter tells the label.
IMAGES = RNG.normal(scale=0.3, size=(13, 32, 8, 8, 1)).astype(np.float32)
for quarter in range(4):
    row, column = divmod(quarter, 2)
    patch = (slice(4 * row, 4 * row + 4), slice(4 * column, 4 * column + 4))
    IMAGES[:, :, *patch, 0] += (quarter == LABELS)[..., None, None]
BATCHES = [{"image": x, "label": y} for x, y in zip(IMAGES[:12], LABELS[:12], strict=True)]
UNSEEN = {"image": IMAGES[12], "label": LABELS[12]}


def slow():
    base = js.local_sgd("replica", sync_every=2)
    return js.slowmo("replica", base=base, sync_every=4, momentum=0.2, learning_rate=0.01)


def cross_entropy(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def accuracy(logits):
    return np.mean(np.argmax(logits, -1) == UNSEEN["label"])


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(4 * 4 * 8, 4, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        x = nnx.avg_pool(x, (2, 2), strides=(2, 2))
        return self.head(self.dropout(x.reshape(x.shape[0], -1)))


def nnx_loss(model, batch):
    logits = model(batch["image"])
    return cross_entropy(logits, batch), logits


@pytest.mark.usefixtures("standard_promotion")  # flax's pools count in integers
def test_nnx_with_the_training_step():
    mesh = js.make_mesh({"replica": 4})
    graphdef, params, rest = nnx.split(CNN(nnx.Rngs(0)), nnx.Param, ...)

    def loss_fn(params, batch, *, model_state):
        model = nnx.merge(graphdef, params, model_state, copy=True)
        loss, logits = nnx_loss(model, batch)
        hits = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
        return loss, ({"accuracy": hits}, nnx.state(model, nnx.Not(nnx.Param)))

    step = js.make_train_step(loss_fn, optax.adam(0.01), sync=slow(), mesh=mesh)
    state = step.init(params, model_state=rest)
    metrics = nnx.MultiMetric(
        accuracy=nnx.metrics.Average("accuracy"), loss=nnx.metrics.Average("loss")
    )
    for result in js.train_loop(step, state, BATCHES):
        metrics.update(**result.metrics)
        state = result.state
    keys = jax.random.key_data(state.model_state["dropout"]["rngs"]["key"][...])
    assert len(np.unique(np.asarray(keys), axis=0)) == 4
    np.testing.assert_array_equal(state.model_state["dropout"]["rngs"]["count"][...], [12] * 4)
    model = nnx.merge(graphdef, *js.consensus((state.params, state.model_state), mesh=mesh))
    model.eval()
    assert accuracy(model(UNSEEN["image"])) > 0.9
    seen = metrics.compute()  # means over all batches and replicas
    assert seen["accuracy"] > 0.6
    assert seen["loss"] < np.log(4)
