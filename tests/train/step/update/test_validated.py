"""Updates that are made before it is known whether they stand do not wait for it.

`test_replica_step.py` and `test_alike.py` have what they compute.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.reports.communication import parse_module

R, LOCAL, STEPS = 2, 2, 6
RNG = np.random.default_rng(0)
PARAMS = {
    "w": RNG.normal(size=(4, 4)).astype(np.float32),
    "b": RNG.normal(size=4).astype(np.float32),
}
X = RNG.normal(size=(STEPS, R * LOCAL, 4)).astype(np.float32)
# Gradients are small and large in turn, so that some updates clip and some do not.
SIZES = np.array([0.1, 5.0, 0.2, 0.1, 8.0, 3.0], np.float32)
MEAN, CLIP = js.all_reduce_gradients("replica"), js.clip_by_global_norm(2.0)


def loss(params, batch):
    x, factor = batch
    return ((jnp.tanh(x @ params["w"]) + params["b"]).sum(-1) * factor).mean()


def in_parts(optimizer, validate, gradients=MEAN):
    """A step and its state, with parameters in parts over "fsdp", which the compiler has."""
    mesh = js.make_mesh({"replica": R, "fsdp": 2})
    options = {"gradients": gradients, "validate": validate, "donate": False}
    step = js.make_train_step(loss, optimizer, mesh=mesh, **options)
    lies = NamedSharding(mesh, P("fsdp"))
    return step, step.init({k: jax.device_put(x, lies) for k, x in PARAMS.items()})


def marked():
    """An optimizer whose arithmetic shows in a program: nothing else there has an atan2."""
    return optax.stateless(lambda u, _: jax.tree.map(lambda x: -0.1 * jnp.arctan2(x, 3.0), u))


PLACES = {
    "gradients": {"optimizer": marked(), "gradients": js.chain(MEAN, CLIP)},
    "loss scale": {"optimizer": js.dynamic_loss_scale(js.chain(CLIP, marked()))},
}


@pytest.mark.parametrize("place", PLACES)
def test_the_optimizer_does_not_wait_for_the_norm(place):
    """Read off what is compiled: no instruction of its arithmetic comes after the norm's exchange.

    But in the conditional, where clipped gradients are taken.
    """
    waits, batch = {}, (X[0], np.repeat(SIZES[0], R * LOCAL))
    for validate in ("before", "after"):
        step, state = in_parts(validate=validate, **PLACES[place])
        waits[validate] = waiting(parse_module(step.compiled(state, batch).as_text()))
        assert waits[validate]
    assert all(waits["before"])
    assert not any(waits["after"])


def waiting(module):
    """Whether each instruction of the entry that holds an atan2 waits for an exchanged number."""
    entry = module.computations[module.entry].lines

    def holds(text):
        callees = re.findall(r"(?:calls|to_apply)=%?([\w.-]+)", text)
        inside = [x for name in callees for x in module.computations[name].lines.values()]
        return " atan2(" in text or any(map(holds, inside))

    # The norm, and whether something is not finite; gradients are no scalars.
    late = {n for n, x in entry.items() if re.match(r"\(?\w+\[\].* all-reduce\(", x)}
    assert any("clip_by_global_norm" in entry[name] for name in late)
    for name, text in entry.items():  # operands come before what uses them
        if late & set(re.findall(r"%([\w.-]+)", text)):
            late.add(name)
    return [name in late for name, text in entry.items() if holds(text)]
