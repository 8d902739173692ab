"""One transform, every execution, equal results; and all equal to the NumPy oracle.

Several chains share one program, each with its own parameters, so that a test compiles once per
phase and not once per algorithm.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
import oracle
from executions import EXECUTIONS, SCHEDULES, run

pytestmark = pytest.mark.xdist_group("executions")  # cases share cached results

STEPS = 9
RATES = np.array([0.0, 0.1, 0.2, 0.1, 0.1, 0.05, 0.02, 0.0, 0.0])  # warm-up, slow step at rate 0
SHAPES: dict[str, Any] = {
    "large": ((41, 7), np.float32),
    "odd": ((3,), np.float32),
    "scalar": ((), np.float32),
    "half": ((5, 3), jnp.bfloat16),
    "other_half": ((), jnp.bfloat16),
}


def schedule(t):
    return jnp.asarray(RATES, jnp.float32)[t]


MAIN = ("local_sgd", "slowmo", "slowmo_base_left", "diloco")


def syncs(local: str | None, names: tuple[str, ...] | None) -> dict[str, js.ParameterTransform]:
    """Parameter transforms, all due on multiples of 2 and 4: those in `names`, or all."""
    options: dict[str, Any] = {"local_axis_name": local}

    def slowmo(**kwargs: Any) -> js.ParameterTransform:
        base = js.local_sgd("replica", sync_every=2, **options)
        return js.slowmo(
            "replica", base=base, sync_every=4, learning_rate=schedule, **kwargs, **options
        )

    every = {
        "local_sgd": js.local_sgd("replica", sync_every=2, **options),
        "local_sgd_buckets": js.local_sgd("replica", sync_every=2, bucket_bytes=64, **options),
        "slowmo": slowmo(),
        "slowmo_buckets": slowmo(bucket_bytes=512, momentum=0.5),
        "slowmo_unsharded": slowmo(shard_state=False),
        "slowmo_nesterov": slowmo(nesterov=True, momentum=0.8, slow_learning_rate=0.7),
        "slowmo_base_left": slowmo(exact_average=False),
        "diloco": js.diloco("replica", sync_every=4, **options),
        "diloco_adam": js.diloco(
            "replica", sync_every=4, outer_optimizer=optax.adam(0.05), **options
        ),
    }
    return every if names is None else {name: every[name] for name in names}


ORACLES: dict[str, dict[str, Any]] = {
    "local_sgd": {"average_every": 2},
    "local_sgd_buckets": {"average_every": 2},
    "slowmo": {"average_every": 2, "outer": oracle.Outer(4, 0.5)},
    "slowmo_buckets": {"average_every": 2, "outer": oracle.Outer(4, 0.5)},
    "slowmo_unsharded": {"average_every": 2, "outer": oracle.Outer(4, 0.5)},
    "slowmo_nesterov": {"average_every": 2, "outer": oracle.Outer(4, 0.8, 0.7, nesterov=True)},
    "slowmo_base_left": {"average_every": 2, "outer": oracle.Outer(4, 0.5, exact=False)},
    "diloco": {"outer": oracle.Outer(4, 0.9, 0.7, nesterov=True)},
}


class Together(js.ParameterTransform):
    """Chains side by side, each on its own copy of the parameters and the same gradients."""


def together(local: str | None, names: tuple[str, ...] | None) -> Together:
    parts = syncs(local, names)
    inner = [js.all_reduce_gradients(local)] if local else []
    chains = {
        name: optax.chain(*inner, optax.sgd(schedule, momentum=0.9), sync)
        for name, sync in parts.items()
    }

    def init(params):
        return {name: tx.init(params[name]) for name, tx in chains.items()}

    def update(grads, state, params, *, phase=None, **extra):
        out = {
            name: tx.update(
                grads, state[name], params[name], phase=None if phase is None else dict(phase)[name]
            )
            for name, tx in chains.items()
        }
        return {n: u for n, (u, _) in out.items()}, {n: s for n, (_, s) in out.items()}

    return Together(
        init,
        update,
        phase=lambda t: tuple((name, sync.phase(t)) for name, sync in parts.items()),
        due=lambda t: True,
        schedules=(),
    )


@functools.cache
def problem(replicas: int, devices: int):
    """Initial parameters and gradients, the same for every execution."""
    rng = np.random.default_rng(replicas * 10 + devices)

    def tree(*lead: int):
        values = {k: rng.normal(size=(*lead, *s)).astype(d) for k, (s, d) in SHAPES.items()}
        return {**values, "empty": {}, "nothing": ()}

    one, grads = tree(), tree(STEPS, replicas * devices)
    params = jax.tree.map(lambda x: np.broadcast_to(x, (replicas, *x.shape)).copy(), one)
    return params, grads


@functools.cache
def results(
    replicas: int,
    devices: int,
    execution: str,
    scheduled: str,
    names: tuple[str, ...] | None = None,
):
    params, grads = problem(replicas, devices)
    axes = {"replica": replicas} if devices == 1 else {"replica": replicas, "device": devices}
    tx = together("device" if devices > 1 else None, names)
    copies = dict.fromkeys(syncs(None, names), params)
    history, state = run(
        tx,
        copies,
        grads,
        axes=axes,
        execution=execution,
        sync=tx if scheduled == "host" else None,
    )
    return jax.tree.map(lambda *xs: np.stack(xs), *history), state


def compare(ours, theirs, *, float32: float, half: float) -> None:
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True
    ):
        tolerance = float32 if a.dtype == np.float32 else half
        np.testing.assert_allclose(
            a.astype(np.float64),
            b.astype(np.float64),
            rtol=tolerance,
            atol=tolerance,
            err_msg=jax.tree_util.keystr(path),
        )


ALL = [
    ("vmap", "traced", 4, 1, None),
    ("shard_map", "traced", 4, 1, None),
    ("shard_map", "host", 4, 1, None),
    ("shard_map", "traced", 2, 2, None),
]
OTHERS = [
    *((e, s, n, d, MAIN) for e in EXECUTIONS for s in SCHEDULES for n, d in [(4, 1), (2, 2)]),
    *(("shard_map", "traced", n, d, MAIN) for n, d in [(2, 1), (8, 1), (4, 2)]),
]


@pytest.mark.parametrize(
    ("execution", "scheduled", "replicas", "devices", "names"),
    ALL + [case for case in OTHERS if (*case[:4], None) not in ALL],
)
def test_equal_to_the_oracle_and_to_each_other(execution, scheduled, replicas, devices, names):
    ours, _ = results(replicas, devices, execution, scheduled, names)
    params, grads = problem(replicas, devices)
    for name, settings in ORACLES.items():
        if name not in ours:
            continue
        outer = settings.get("outer")
        if outer is not None and name != "diloco":
            outer.gamma = lambda t: RATES[t]
        for leaf in ("large", "odd", "scalar"):
            g = grads[leaf].reshape(STEPS, replicas, devices, *grads[leaf].shape[2:]).mean(2)
            expected = oracle.train(
                params[leaf],
                g,
                learning_rate=lambda t: RATES[t],
                inner_momentum=0.9,
                **settings,
            )
            np.testing.assert_allclose(ours[name][leaf], expected, rtol=3e-6, atol=3e-6)
    reference, _ = results(replicas, devices, "vmap", "traced", names)
    # Half-precision leaves: compilers may round at other places, 2**-8 relative at a time.
    compare(ours, reference, float32=1e-6, half=3e-2)


def test_states_agree_between_executions():
    _, virtual = results(4, 1, "vmap", "traced", None)
    _, devices = results(4, 1, "shard_map", "host", None)
    assert jax.tree.structure(virtual) == jax.tree.structure(devices)
    for a, b in zip(jax.tree.leaves(virtual), jax.tree.leaves(devices), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        # Anchors hold half-precision leaves too, in float32, so their tolerance it is.
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=3e-2, atol=3e-2
        )


@pytest.mark.parametrize("name", ["local_sgd", "slowmo", "slowmo_unsharded", "diloco"])
def test_replicas_agree_after_a_synchronisation(name):
    ours, _ = results(4, 1, "shard_map", "traced", None)
    for leaf, values in ours[name].items():
        if not isinstance(values, dict | tuple):
            after = values[3].astype(np.float32)  # update 4
            # params + (target - params) is target up to 1 ulp of the larger operand
            bound = np.spacing(np.abs(values[2:4].astype(np.float32)).max()).item()
            if values.dtype != np.float32:
                bound = 0.0
            assert np.ptp(after, axis=0).max() <= 2 * bound, leaf
            assert np.ptp(values[2].astype(np.float32), axis=0).max() > 1e-3  # and not before
