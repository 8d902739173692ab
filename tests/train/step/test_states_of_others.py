"""A step refuses the state of a step of another algorithm, unless both have the same form."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js

PARAMS = {"w": np.ones(4, np.float32)}
BATCH = np.ones((4, 4), np.float32)
LOCAL = js.local_sgd("replica", sync_every=2)
SLOWMO = js.slowmo("replica", base=LOCAL, sync_every=4)
SYNCS = {
    "none": "none",
    "local_sgd": LOCAL,
    "sgp": js.sgp("replica"),
    "sgp late": js.sgp("replica", overlap=3),
    "slowmo": SLOWMO,
    "slowmo whole": js.slowmo("replica", base=LOCAL, sync_every=4, shard_state=False),
    "slowmo over sgp": js.slowmo("replica", base=js.sgp("replica"), sync_every=4),
    "diloco": js.diloco("replica", sync_every=4),
    "only_finite": js.only_finite(LOCAL),
    "only_finite around slowmo": js.only_finite(SLOWMO),
    "all_reduce": None,
}

# Algorithms that remember nothing have one form, and whole and sharded state differ in the layout.
SAME = [{"none", "local_sgd"}, {"slowmo", "slowmo whole"}]


def step_of(name, mode="traced"):
    mean = js.all_reduce_gradients("replica") if name == "all_reduce" else None
    return js.make_train_step(
        lambda params, batch: jnp.mean((params["w"][None] - batch) ** 2),
        optax.sgd(0.1, momentum=0.9),
        sync=SYNCS[name],
        gradients=mean,
        mesh=js.virtual_mesh({"replica": 2}),
        mode=mode,
        donate=False,
    )


@pytest.fixture(scope="module")
def states():
    return {name: step_of(name).init(PARAMS) for name in SYNCS}


@pytest.mark.parametrize(
    ("name", "mode"), [("none", "host"), ("slowmo", "traced"), ("sgp", "host")]
)
def test_every_other_state_is_refused(name, mode, states):
    step = step_of(name, mode)
    alike = next((names for names in SAME if name in names), {name})
    with pytest.raises(ValueError, match=r"same `optimizer`: only one of the two has "):
        step(states[name]._replace(opt_state=()), BATCH)
    for other in states:
        if other in alike:
            step(states[other], BATCH)
        else:
            with pytest.raises(ValueError, match=r"same `sync`, .* only one|same `gradients`: "):
                step(states[other], BATCH)
        step.evaluate(states[other], BATCH)  # a batch is evaluated whatever made the state
    with pytest.raises(ValueError, match=r"same `sync`, .* only one"):
        step.next_phase(states["diloco"])
