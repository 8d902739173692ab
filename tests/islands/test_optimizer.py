"""NumPy runs an optax optimizer's own program, and refuses what would not be equal everywhere."""

import jax
import numpy as np
import optax
import pytest

import jaxslowmo as js
from jaxslowmo.islands._optimizer import HostOptimizer
from support.promotion import promoting

PARAMS = {"a": np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3), "b": np.ones(5, np.float32)}
OPTIMIZERS = {
    "sgd": optax.sgd(0.7),
    "nesterov": optax.sgd(0.7, momentum=0.9, nesterov=True),
    "slowmo": js.slow_momentum(0.5, 0.8),
    "adamw": optax.adamw(1e-2),
    "adamw, masked otherwise": optax.adamw(1e-2, weight_decay=0.1, mask={"a": False, "b": True}),
    "adamw, masked by name": optax.adamw(
        1e-2,
        mask=lambda tree: jax.tree_util.tree_map_with_path(lambda p, x: p[0].key == "a", tree),
        weight_decay=0.2,
    ),
    "schedule": promoting(optax.sgd(optax.cosine_decay_schedule(0.1, 4), momentum=0.9)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_optax(name):
    optimizer = optax.with_extra_args_support(OPTIMIZERS[name])
    host, rng = HostOptimizer(optimizer, PARAMS), np.random.default_rng(0)
    values = jax.tree.leaves(PARAMS)
    outer = host.init(values)
    params, state = PARAMS, optimizer.init(PARAMS)
    for _ in range(6):
        away = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), PARAMS)
        values, outer = host.step(jax.tree.leaves(away), outer, values)
        updates, state = optimizer.update(away, state, params)
        params = optax.apply_updates(params, updates)
    for x, y in zip(values, jax.tree.leaves(params), strict=True):
        assert (type(x), x.dtype) == (np.ndarray, np.float32)
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-6)
    assert [(x.shape, x.dtype) for x in outer] == host.state_types


def test_programs_are_told_apart_and_are_the_same_with_all_releases():
    texts = {name: HostOptimizer(x, PARAMS).fingerprint for name, x in OPTIMIZERS.items()}
    assert len(set(texts.values())) == len(texts)
    assert HostOptimizer(optax.sgd(0.71), PARAMS).fingerprint not in texts.values()
    assert (texts["nesterov"], texts["slowmo"], texts["adamw"]) == RECORDED


RECORDED = ("5e990edaa2b5539f", "95a236f5a6d96dcc", "0b679cfb64b2d934")


@pytest.mark.parametrize(
    ("optimizer", "operation"),
    [
        (optax.clip_by_global_norm(1.0), "reduce_sum"),
        (optax.rmsprop(0.1), "rsqrt"),
        (optax.contrib.muon(0.1), "transpose"),
    ],
)
def test_other_programs_are_refused_by_name(optimizer, operation):
    with pytest.raises(ValueError, match=f"`outer_optimizer` must be element-wise .* '{operation}"):
        HostOptimizer(optimizer, PARAMS)
