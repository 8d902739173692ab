"""What the class of a state says: what must come last in a chain."""

import jax
import numpy as np
import optax
import pytest

import jaxslowmo as js

PARAMS = {"b": np.ones(2, np.float32), "w": np.ones(3, np.float32)}
STACKED = jax.tree.map(lambda x: np.stack([x] * 2), PARAMS)
MESH = js.virtual_mesh({"replica": 2})
AVERAGE = js.local_sgd("replica", sync_every=2)
SLOW = js.slowmo("replica", base=AVERAGE, sync_every=4)


def step_of(optimizer, replicas=2, **options):
    mesh = js.virtual_mesh({"replica": replicas})
    return js.make_train_step(lambda p, b: (p["w"] * b).sum(), optimizer, mesh=mesh, **options)


# The order of a chain

SGD, BOTH = optax.sgd(0.1), {"b": True, "w": True}
WRONG_CHAIN, RIGHT_CHAIN = optax.chain(AVERAGE, SGD), optax.chain(SGD, AVERAGE)
FIRST = r"\[0\], ExchangeState, stands \[1\]\[0\]"
WRONG = {
    "nested": (optax.chain(RIGHT_CHAIN, SGD), r"\[0\]\[1\].*\[1\]\[0\]"),
    "masked": (optax.chain(SGD, optax.masked(WRONG_CHAIN, BOTH)), FIRST),
    "partition": (optax.partition({0: WRONG_CHAIN, 1: SGD}, {"b": 0, "w": 1}), FIRST),
}


@pytest.mark.parametrize("name", WRONG)
def test_parameter_transforms_come_last(name):
    """What follows would scale or clip the way to the synchronised parameters, silently."""
    tx, where = WRONG[name]
    with pytest.raises(ValueError, match=f"init: .*after {where}"):
        js.init(tx, STACKED, mesh=MESH)


def test_chains_in_order_are_taken():
    partition = optax.partition({0: RIGHT_CHAIN, 1: SGD}, {"b": 0, "w": 1})
    named = optax.named_chain(("z", SGD), ("a", AVERAGE))
    for tx in (named, partition, optax.chain(optax.clip(1.0), RIGHT_CHAIN, SLOW)):
        js.init(tx, STACKED, mesh=MESH)
    step_of(SGD, sync=AVERAGE).init(PARAMS)
    with pytest.raises(ValueError, match=r"after .*ExchangeState"):
        step_of(WRONG_CHAIN).init(PARAMS)
