"""Runs of many parameter transforms in one program, on a problem with all kinds of leaves.

Each chain has its own parameters, so a test compiles once per phase and not once per algorithm.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxslowmo as js
from support import oracle
from support.executions import run

STEPS = 9
RATES = np.array([0.0, 0.1, 0.2, 0.1, 0.1, 0.05, 0.02, 0.0, 0.0])  # warm-up, slow step at rate 0
SHAPES: dict[str, Any] = {
    "large": ((41, 7), np.float32),
    "odd": ((3,), np.float32),
    "scalar": ((), np.float32),
}
MOMENTUM = 0.9


def schedule(t):
    return jnp.asarray(RATES, jnp.float32)[t]


class Together(optax.GradientTransformationExtraArgs):
    """Chains side by side, each on its own copy of the parameters and the same gradients."""

    parts: Mapping[str, js.ParameterTransform]

    @property
    def algorithm(self) -> "Together":
        return self

    def phase(self, t: int, skipped: int = 0) -> tuple[tuple[str, Any], ...]:
        return tuple((name, sync.algorithm.phase(t, skipped)) for name, sync in self.parts.items())


def together(parts: Mapping[str, js.ParameterTransform], local_axis: str | None) -> Together:
    inner = [js.all_reduce_gradients(local_axis)] if local_axis else []
    chains = {
        name: optax.chain(*inner, optax.sgd(schedule, momentum=MOMENTUM), sync)
        for name, sync in parts.items()
    }

    def init(params):
        return {name: tx.init(params[name]) for name, tx in chains.items()}

    def update(grads, state, params, *, phase=None, **extra):
        out = {
            name: tx.update(
                grads,
                state[name],
                params[name],
                phase=None if phase is None else dict(phase).get(name, ()),
                **extra,
            )
            for name, tx in chains.items()
        }
        return {n: u for n, (u, _) in out.items()}, {n: s for n, (_, s) in out.items()}

    made = Together(init, update)
    made.parts = parts
    return made


@functools.cache
def problem(replicas: int, devices: int):
    """Return initial parameters and gradients, the same for every execution."""
    rng = np.random.default_rng(replicas * 10 + devices)

    def tree(*lead: int):
        values = {k: rng.normal(size=(*lead, *s)).astype(d) for k, (s, d) in SHAPES.items()}
        return {**values, "empty": {}, "nothing": ()}

    one, grads = tree(), tree(STEPS, replicas * devices)
    params = jax.tree.map(lambda x: np.broadcast_to(x, (replicas, *x.shape)).copy(), one)
    return params, grads


def run_together(
    parts: Mapping[str, js.ParameterTransform],
    replicas: int,
    devices: int,
    execution: str,
    scheduled: str,
    *,
    steps: int = STEPS,
):
    """Return parameters `{name: tree}` with leading axes (steps, replicas)."""
    params, grads = problem(replicas, devices)
    axes = {"replica": replicas} if devices == 1 else {"replica": replicas, "device": devices}
    tx = together(parts, "device" if devices > 1 else None)
    history, _ = run(
        tx,
        dict.fromkeys(parts, params),
        jax.tree.map(lambda g: g[:steps], grads),
        axes=axes,
        execution=execution,
        sync=tx if scheduled == "host" else None,
    )
    return jax.tree.map(lambda *xs: np.stack(xs), *history)


def check_oracle(ours, name: str, replicas: int, devices: int, **settings: Any) -> None:
    """Raise unless the float32 leaves of chain `name` are those of `oracle.train`."""
    params, grads = problem(replicas, devices)
    for leaf in ("large", "odd", "scalar"):
        g = grads[leaf].reshape(STEPS, replicas, devices, *grads[leaf].shape[2:]).mean(2)
        expected = oracle.train(
            params[leaf],
            g,
            learning_rate=lambda t: RATES[t],
            inner_momentum=MOMENTUM,
            **settings,
        )
        history = ours[name][leaf]
        np.testing.assert_allclose(
            history, expected[: len(history)], rtol=3e-6, atol=3e-6, err_msg=f"{name}/{leaf}"
        )
