"""A step refuses the state that a step of another algorithm has made, for all pairs of them."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.exhaustive import sweep

PARAMS = {"w": np.ones(3, np.float32)}
BATCH = np.ones((4, 3), np.float32)


def local():
    return js.local_sgd("replica", sync_every=2)


SYNCS = {
    "none": lambda: "none",
    "local_sgd": local,
    "sgp": lambda: js.sgp("replica"),
    "sgp late": lambda: js.sgp("replica", overlap=3),
    "slowmo": lambda: js.slowmo("replica", base=local(), sync_every=4),
    "slowmo whole": lambda: js.slowmo("replica", base=local(), sync_every=4, shard_state=False),
    "slowmo over sgp": lambda: js.slowmo("replica", base=js.sgp("replica"), sync_every=4),
    "diloco": lambda: js.diloco("replica", sync_every=4),
    "only_finite": lambda: js.only_finite(local()),
    "only_finite around slowmo": lambda: js.only_finite(SYNCS["slowmo"]()),
    "all_reduce": lambda: None,
}
MESH = js.virtual_mesh({"replica": 2})


def step_of(name: str, mode: str) -> js.TrainStep:
    sync = SYNCS[name]()
    return js.make_train_step(
        lambda params, batch: jnp.mean((params["w"] - batch) ** 2),
        optax.sgd(0.1, momentum=0.9),
        sync=sync,
        gradients=js.all_reduce_gradients("replica") if sync is None else None,
        mesh=MESH,
        mode=mode,
    )


@pytest.fixture(scope="module")
def states():
    return {name: step_of(name, "traced").init(PARAMS) for name in SYNCS}


@pytest.mark.parametrize("mode", ["traced", "host"])
@pytest.mark.parametrize("name", sweep(SYNCS, lambda name: name in ("none", "slowmo", "sgp")))
def test_every_other_state_is_refused(name, mode, states):
    step = step_of(name, mode)
    for other in [x for x in states if x != name]:
        with pytest.raises(ValueError, match="state"):
            step(states[other], BATCH)
    with pytest.raises(ValueError, match=r"same `sync`.*keeps .* for it, and .*has tuple"):
        step(states[name]._replace(opt_state=()), BATCH)
    make = step_of(name, mode)
    make(make.init(PARAMS), BATCH)


def test_the_message_names_both_classes(states):
    with pytest.raises(ValueError, match=r"OuterState for it, and `state\.opt_state` has SGPState"):
        step_of("slowmo", "traced")(states["sgp"], BATCH)
    with pytest.raises(ValueError, match=r"NoExchangeState for it, .* has LocalSGDState"):
        step_of("none", "host").next_phase(states["local_sgd"])
    # A batch is evaluated whatever made the state.
    step_of("none", "traced").evaluate(states["local_sgd"], BATCH)
