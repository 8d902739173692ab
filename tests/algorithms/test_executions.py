"""One transform, every execution, equal results; and all equal to the NumPy oracle."""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support import oracle
from support.executions import EXECUTIONS, SCHEDULES
from support.side_by_side import RATES, check_oracle, compare, run_together, schedule

pytestmark = pytest.mark.xdist_group("executions")  # cases share cached results


# `slowmo_base_left` ends its periods with local_sgd's average.
MAIN = ("slowmo", "slowmo_base_left", "diloco")


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


@functools.cache
def results(
    replicas: int,
    devices: int,
    execution: str,
    scheduled: str,
    names: tuple[str, ...] | None = None,
):
    parts = syncs("device" if devices > 1 else None, names)
    return run_together(parts, replicas, devices, execution, scheduled)


ALL = [
    ("vmap", "traced", 4, 1, None),
    ("shard_map", "traced", 4, 1, None),
    ("shard_map", "host", 4, 1, None),
]
OTHERS = [
    *((e, s, n, d, MAIN) for e in EXECUTIONS for s in SCHEDULES for n, d in [(4, 1), (2, 2)]),
    *(("shard_map", "traced", n, d, MAIN) for n, d in [(2, 1), (8, 1), (4, 2)]),
]
# Of the others: every execution, both schedules, and both levels.
USUAL = {
    ("pmap", "host", 4, 1),
    ("shard_map", "traced", 2, 2),
    ("shard_map_unchecked", "host", 2, 2),
}


def share(replicas: int, devices: int) -> pytest.MarkDecorator:
    """Tests that share cached results run in one process."""
    return pytest.mark.xdist_group(f"executions over {replicas} x {devices}")


def case(*given):
    usual = given in ALL or given[:4] in USUAL
    marks = [share(*given[2:4]), *([] if usual else [pytest.mark.exhaustive])]
    return pytest.param(*given, marks=marks)


@pytest.mark.parametrize(
    ("execution", "scheduled", "replicas", "devices", "names"),
    [case(*given) for given in ALL + [other for other in OTHERS if (*other[:4], None) not in ALL]],
)
def test_equal_to_the_oracle_and_to_each_other(execution, scheduled, replicas, devices, names):
    ours, _ = results(replicas, devices, execution, scheduled, names)
    for name, settings in ORACLES.items():
        if name not in ours:
            continue
        outer = settings.get("outer")
        if outer is not None and name != "diloco":
            outer.gamma = lambda t: RATES[t]
        check_oracle(ours, name, replicas, devices, **settings)
    reference, _ = results(replicas, devices, "vmap", "traced", names)
    # Half-precision leaves: compilers may round at other places, 2**-8 relative at a time.
    compare(ours, reference, float32=1e-6, half=3e-2)


@share(4, 1)
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


@share(4, 1)
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
