"""Optimizers, gradient transforms and algorithms of the drawn options."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

import jaxslowmo as js

from .drawing import Options
from .problems import joined


def _sgd(rate: float = 0.1) -> Any:
    return optax.sgd(rate, momentum=0.9)


def _labels(params: Any) -> Any:
    return {name: ("first" if name in ("in", "w") else "rest") for name in params}


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": _sgd,
    "adamw": lambda: optax.adamw(0.05),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.05),
    "partition": lambda: optax.partition({"first": optax.adam(0.05), "rest": _sgd()}, _labels),
    "masked": lambda: optax.chain(
        optax.masked(optax.trace(0.9), lambda tree: {k: k == "in" for k in tree}),
        optax.scale(-0.05),
    ),
    "schedule_free": lambda: optax.contrib.schedule_free_sgd(0.1),
    "cocob": lambda: optax.contrib.cocob(),
    "madgrad": lambda: optax.contrib.madgrad(0.05),
    "prodigy": lambda: optax.contrib.prodigy(estim_lr0=1e-2),
    "polyak": lambda: optax.polyak_sgd(0.1),
    "plateau": lambda: optax.chain(_sgd(), optax.contrib.reduce_on_plateau(patience=1)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.05), 2).gradient_transformation(),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.05), 3),
}


def _local(every: int = 2, **options: Any) -> Any:
    return js.local_sgd("replica", sync_every=every, **options)


def _slowmo(base: Any = None, **options: Any) -> Any:
    base = _local() if base is None else base
    return js.slowmo("replica", base=base, sync_every=4, momentum=0.5, learning_rate=0.1, **options)


SYNC: dict[str, Callable[[], Any]] = {
    "local_sgd": _local,
    "local_sgd scheduled": lambda: _local(
        js.every(3, start=1, before="all"),  # pyright: ignore[reportArgumentType]
        bucket_bytes=8,
    ),
    "local_sgd 16 bits": lambda: _local(codec=js.codecs.bfloat16(error_feedback=True)),
    "only_finite": lambda: js.only_finite(_slowmo()),
    "slowmo": _slowmo,
    "slowmo whole": lambda: _slowmo(shard_state=False, nesterov=True),
    "slowmo inexact": lambda: _slowmo(exact_average=False),
    "slowmo over sgp": lambda: _slowmo(js.sgp("replica", overlap=1)),
    "sgp": lambda: js.sgp("replica"),
    "sgp late": lambda: js.sgp("replica", overlap=2, codec=js.codecs.float16()),
    "diloco": lambda: js.diloco("replica", sync_every=3),
}


def _reduced(axes: Any, **options: Any) -> Any:
    return js.all_reduce_gradients(axes, **options)


GRADIENTS: dict[str, Callable[[Any], Any]] = {
    "mean": _reduced,
    "mean active": lambda axes: _reduced(axes, divide_by="active"),
    "buckets": lambda axes: _reduced(axes, bucket_bytes=16),
    "int8": lambda axes: _reduced(axes, hook=js.hooks.int8(block_size=4)),
    "top_k": lambda axes: _reduced(axes, hook=js.hooks.top_k(0.3)),
    "rows": lambda axes: js.sparse.all_reduce_rows(axes, tables=["in/w"], dense=_reduced(axes)),
}


def _clip(options: Options) -> Any:
    del options
    return js.clip_by_global_norm(0.3)


def gradients_of(options: Options) -> list[Any]:
    """The gradient transforms: reduction, clipping."""
    name = options["gradients"]
    parts = [] if name is None else [GRADIENTS[name](options["axes"])]
    return parts + ([_clip(options)] if options["clip"] == "gradients" else [])


def optimizer_of(options: Options) -> Any:
    """The optimizer with the clipping before it and the loss scale around both."""
    tx = OPTIMIZERS[options["optimizer"]]()
    if options["clip"] == "optimizer":
        tx = joined(_clip(options), tx)
    if options["scale"]:
        tx = js.dynamic_loss_scale(tx, initial=2.0**14, growth_interval=3)
    return tx


def sync_of(options: Options) -> Any:
    """The parameter transform, or None."""
    return None if options["sync"] is None else SYNC[options["sync"]]()


def weights(options: Options, replicas: int, update: int) -> Any:
    """Shares of the replicas, one of which runs out of data; None where they count alike."""
    if not options["weight"]:
        return None
    shares = jnp.arange(1.0, replicas + 1)
    return shares.at[-1].set(0.0) if update > 2 else shares
