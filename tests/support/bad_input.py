"""Small programs for tests of arguments that are refused."""

import warnings

import jax
import jax.numpy as jnp

from support.executions import lift

PARAMS = {"b": jnp.ones((4, 2)), "w": jnp.ones((4, 3, 2))}


def trace(fn, *args, execution="vmap", axes=None):
    """Trace `fn` of one replica, without compiling it; return the shapes of its results."""
    return jax.eval_shape(lift(fn, axes or {"replica": 4}, execution, (False,) * len(args)), *args)


def one_update(tx, init=None, **keywords):
    """Return `params -> updates`: a first update of `tx`, with the parameters as gradients."""

    def step(params):
        return tx.update(params, (init or tx).init(params), params, **keywords)[0]

    return step


def warning_messages(*calls) -> list[str]:
    """Return the texts of all warnings that `calls` give, which must be UserWarnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in calls:
            call()
    assert all(w.category is UserWarning for w in caught)
    return [str(w.message) for w in caught]
