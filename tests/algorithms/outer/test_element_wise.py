"""Outer optimizers on flat shards: those that need whole leaves are refused."""

import subprocess
import sys

import jax
import optax
import pytest

import jaxslowmo as js
from support.waiting import PATIENCE_SECONDS

ELEMENT_WISE = {
    "adamw": lambda: optax.adamw(optax.linear_schedule(0.1, 0.0, 3), weight_decay=0.1),
    "lion": lambda: optax.lion(0.1),
    "clip": lambda: optax.chain(optax.clip(0.5), optax.sgd(0.1)),
    "every second": lambda: optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
    "slow momentum": lambda: js.slow_momentum(0.5),
}
WHOLE = {
    "far global norm": lambda: optax.chain(optax.clip_by_global_norm(1e6), optax.sgd(0.7)),
    "adafactor, factors alone": lambda: optax.adafactor(
        0.1, multiply_by_parameter_scale=False, clipping_threshold=None
    ),
    "matrices only": lambda: optax.masked(
        optax.sgd(0.1), lambda tree: jax.tree.map(lambda x: x.ndim > 1 and x.shape[0] > 1, tree)
    ),
    "all finite": lambda: optax.apply_if_finite(optax.sgd(0.1), 5),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
}


@pytest.mark.parametrize("name", ELEMENT_WISE)
def test_these_are_taken(name):
    js.diloco("replica", outer_optimizer=ELEMENT_WISE[name]())


@pytest.mark.parametrize("name", WHOLE)
def test_these_are_refused(name):
    with pytest.raises(ValueError, match=r"`outer_optimizer`.*shard_state=False"):
        js.diloco("replica", outer_optimizer=WHOLE[name]())
    js.diloco("replica", outer_optimizer=WHOLE[name](), shard_state=False)


def test_settings_of_the_caller_do_not_count():
    """The probe holds a NaN, and moves arrays."""
    with jax.debug_nans(True), jax.transfer_guard("disallow"), jax.numpy_dtype_promotion("strict"):
        js.diloco("replica", outer_optimizer=optax.adam(0.1))


def test_before_jax_has_a_device_it_waits_for_one():
    """Else `jax.distributed.initialize` could no longer be called."""
    program = """
import jax, jax.numpy as jnp, optax, jaxslowmo as js
from jax._src.xla_bridge import backends_are_initialized
tx = js.diloco("replica", outer_optimizer=optax.lamb(0.1))
assert not backends_are_initialized()
try:
    jax.vmap(tx.init, axis_name="replica")({"w": jnp.ones((2, 3))})
except ValueError as error:
    assert "`outer_optimizer` must treat every element by itself" in str(error)
else:
    raise SystemExit("not refused")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_SECONDS)
