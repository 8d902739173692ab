"""Calls that must be refused, by name; what is compared is the error and what it names."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxslowmo as js

from .drawing import WRONG
from .problems import (
    batches,
    joined,
    loss,
    mesh_of,
    parameters,
    table_batches,
    table_loss,
    table_parameters,
    tables,
)


def _mean() -> Any:
    return js.all_reduce_gradients("replica")


def _local() -> Any:
    return js.local_sgd("replica", sync_every=2)


def _clip() -> Any:
    return js.clip_by_global_norm(1.0)


def _made(optimizer: Any = None, mesh: str = "one level", **parts: Any) -> Any:
    tx = optax.sgd(0.1) if optimizer is None else optimizer
    return js.make_train_step(loss, tx, mesh=mesh_of(mesh), **parts)


def _used(optimizer: Any = None, updates: int = 1, **parts: Any) -> Any:
    """A step that is run."""
    step = _made(optimizer, **parts)
    state = step.init(parameters())
    for batch in batches(updates):
        state, _ = step(state, batch)
    return step, state


def _with_tables(optimizer: Any = None, run: bool = True, batch: Any = None, **parts: Any) -> None:
    step = js.make_train_step(
        table_loss,
        optax.sgd(0.1) if optimizer is None else optimizer,
        mesh=mesh_of("shards"),
        embeddings=tables(),
        **parts,
    )
    state = step.init(table_parameters())
    if run:
        step(state, table_batches(1)[0] | (batch or {}))


def _half_weight() -> None:
    step, state = _used(sync=_local())
    step(state, batches(1)[0], np.ones(3, np.float32))


def _uneven_batch() -> None:
    step, state = _used(sync=_local())
    step(state, batches(1, rows=15)[0])


def _donated() -> None:
    step, state = _used(sync=_local())
    step(state, batches(1)[0])
    step(state, batches(1)[0])


def _state_of_another() -> None:
    _, state = _used(sync=_local())
    _made(sync=js.sgp("replica"))(state, batches(1)[0])


def _window_of_nothing() -> None:
    step, state = _used(sync=_local())
    step.apply(state, None)


def _window_of_another() -> None:
    step, state = _used(sync=_local())
    window, _ = step.collect(state, batches(1)[0])
    other = _made(sync=_local())
    other(other.init({"w": jnp.zeros(3)}), batches(1)[0], window=window)


def _line_search() -> Any:
    return optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(4))


def _window_of_a_search() -> None:
    step, state = _used(_line_search(), sync=_local())
    window, _ = step.collect(state, batches(1)[0])
    step.apply(state, window)


def _mean_by_hand() -> Any:
    return optax.stateless(
        lambda grads, _: jax.tree.map(lambda x: jax.lax.pmean(x, "replica"), grads)
    )


def _scaled(*parts: Any) -> Any:
    return js.dynamic_loss_scale(joined(*parts, optax.adam(0.1)))


Misuse = Callable[[], object]
MISUSES: dict[str, Misuse] = {
    # Algorithms.
    "local_sgd, period 0": lambda: js.local_sgd("replica", sync_every=0),
    "local_sgd, buckets": lambda: js.local_sgd("replica", sync_every=1, bucket_bytes=-1),
    "local_sgd, codec": lambda: js.local_sgd("replica", sync_every=1, codec="bfloat16"),
    "slowmo, momentum": lambda: js.slowmo("replica", base=_local(), sync_every=4, momentum=1.5),
    "slowmo, base": lambda: js.slowmo("replica", base=optax.sgd(0.1), sync_every=4),
    "slowmo, period": lambda: js.slowmo("replica", base=_local(), sync_every=3),
    "slowmo, rate": lambda: js.slowmo("replica", base=_local(), sync_every=4, learning_rate="big"),
    "sgp, graph": lambda: js.sgp("replica", graph="ring"),
    "sgp, overlap": lambda: js.sgp("replica", overlap=-1),
    "diloco, period": lambda: js.diloco("replica", sync_every=0),
    "only_finite, optimizer": lambda: js.only_finite(optax.sgd(0.1)),
    "hierarchical, nothing": lambda: js.hierarchical_local_sgd({}),
    "hierarchical, not nested": lambda: js.hierarchical_local_sgd({"a": 2, "b": 4}),
    "every, period": lambda: js.every(0),
    # Gradient transforms.
    "all_reduce, buckets": lambda: js.all_reduce_gradients("replica", bucket_bytes=-1),
    "all_reduce, hook": lambda: js.all_reduce_gradients("replica", hook="int8"),
    "all_reduce, divide_by": lambda: js.all_reduce_gradients("replica", divide_by="all"),
    "all_reduce, max_buckets": lambda: js.all_reduce_gradients("replica", max_buckets=0),
    "all_reduce_rows, output": lambda: js.sparse.all_reduce_rows("replica", output="all"),
    "clip, norm": lambda: js.clip_by_global_norm(0.0),
    "accumulate, every": lambda: js.gradients.accumulate(optax.sgd(0.1), every=0),
    "accumulate, parameter transform": lambda: js.gradients.accumulate(_local(), every=2),
    "loss scale, initial": lambda: js.dynamic_loss_scale(optax.sgd(0.1), initial=0.0),
    "loss scale, growth": lambda: js.dynamic_loss_scale(optax.sgd(0.1), growth=0.5),
    "loss scale, parameter transform": lambda: js.dynamic_loss_scale(_local()),
    "policy, dtype": lambda: js.gradients.Policy("int8"),
    "chain, no transform": lambda: js.chain(1, _local()),
    # Arguments of a step, and combinations.
    "step, nothing exchanged": lambda: _used(),
    "step, none and broadcast": lambda: _made(sync="none", model_state="broadcast"),
    "step, sync as gradients": lambda: _made(gradients=_local()),
    "step, gradients as sync": lambda: _made(sync=_mean()),
    "step, sync of another axis": lambda: _made(sync=js.local_sgd("device", sync_every=2)),
    "step, line search over averaged gradients": lambda: _used(_line_search(), gradients=_mean()),
    "step, two loss scales": lambda: _used(
        js.dynamic_loss_scale(_scaled()), gradients=_mean(), policy=js.gradients.Policy("float16")
    ),
    "step, loss scale in apply_if_finite": lambda: _used(
        optax.apply_if_finite(_scaled(), 3), gradients=_mean()
    ),
    "step, loss scale in MultiSteps": lambda: _used(
        optax.MultiSteps(_scaled(), 2).gradient_transformation(), gradients=_mean()
    ),
    "step, policy of a missing leaf": lambda: _used(
        gradients=_mean(), policy=js.gradients.Policy("bfloat16", keep=("norm",))
    ),
    "step, rate of the optimizer": lambda: _used(
        sync=js.slowmo("replica", base=_local(), sync_every=4, learning_rate="optimizer"), updates=4
    ),
    "step, inner axis not averaged": lambda: _used(
        mesh="two levels", gradients=optax.identity(), sync=_local()
    ),
    "step, host mode and a chain that exchanges": lambda: _used(
        optax.chain(optax.sgd(0.1), _local()), gradients=optax.identity(), mode="host"
    ),
    "step, a mean by hand": lambda: _used(optax.chain(_mean_by_hand(), optax.sgd(0.1))),
    "step, a mean by hand as gradients": lambda: _used(gradients=_mean_by_hand()),
    # Use.
    "use, uneven batch": _uneven_batch,
    "use, weight of another shape": _half_weight,
    "use, donated state": _donated,
    "use, state of another algorithm": _state_of_another,
    "use, window of nothing": _window_of_nothing,
    "use, window of another": _window_of_another,
    "use, window of a line search": _window_of_a_search,
    "use, ahead without tables": lambda: _made(sync=_local()).ahead("exact"),
    # Tables.
    "tables, clipping in gradients": lambda: _with_tables(
        gradients=joined(_mean(), _clip()), run=False
    ),
    "tables, averaging in the optimizer": lambda: _with_tables(
        optax.chain(_mean(), optax.sgd(0.1)), gradients=optax.identity()
    ),
    "tables, exchange in the optimizer": lambda: _with_tables(
        optax.chain(optax.sgd(0.1), _local()), gradients=optax.identity()
    ),
    "tables, clipping in the optimizer": lambda: _with_tables(
        joined(_clip(), optax.sgd(0.1)), gradients=_mean()
    ),
    "tables, apply_if_finite": lambda: _with_tables(
        optax.apply_if_finite(optax.sgd(0.1), 3), gradients=_mean()
    ),
    "tables, MultiSteps": lambda: _with_tables(
        optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(), gradients=_mean()
    ),
    "tables, ids in no table": lambda: _with_tables(
        gradients=_mean(), batch={"user": np.full(16, 24, np.int32)}
    ),
    "tables, a float feature": lambda: _with_tables(
        gradients=_mean(), batch={"user": np.zeros(16, np.float32)}
    ),
    "tables, unknown way to share": lambda: _tables_of(js.Table(10, 4, shard="both")),
    "tables, no rows": lambda: _tables_of(js.Table(0, 4)),
    "tables, ahead mode": lambda: _made_ahead("later"),
}


MISUSES |= {
    f"step, wrong {name}": lambda name=name: _made(
        **({"gradients": _mean(), "mesh": "one level"} | {name: WRONG[name]})
    )
    for name in WRONG
    if name != "mesh"
}


def _tables_of(table: Any) -> object:
    return js.embeddings({"item": table}, axis_name="shard", optimizer=js.rowwise_sgd(0.1))


def _made_ahead(mode: str) -> object:
    step = js.make_train_step(
        table_loss, optax.sgd(0.1), sync=_local(), mesh=mesh_of("shards"), embeddings=tables()
    )
    return step.ahead(mode)


def run(name: str) -> None:
    """Makes the call; warnings are not looked at."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        MISUSES[name]()
