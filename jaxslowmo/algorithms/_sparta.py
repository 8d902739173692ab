"""SPARTA: in every update replicas average a few of the parameters, drawn at random."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .._support.checks import ArgumentError, checked_int, checked_share, records_settings
from .._support.scopes import MODEL_STATE
from .._support.types import AxisName, PyTree
from ..collectives.codecs import Half
from ..transform import (
    Algorithm,
    Carry,
    Event,
    Every,
    ParameterTransform,
    ReplicaGroup,
    UpdateContext,
    as_schedule,
    checked_group,
)
from ..tree import cast
from ._error_feedback import check_sends_parameters


@records_settings
def sparta(
    axis_name: AxisName,
    *,
    share: float = 0.005,
    sync_every: int | Every = 1,
    seed: int = 0,
    local_axis_name: AxisName | None = None,
    bucket_bytes: int | None = None,
    codec: Half | None = None,
) -> ParameterTransform:
    """Average a random `share` of the parameters in every update, and no others (SPARTA).

    Put it last in a chain. With y = params + updates, and in update t of every B = 1 / `share`
    consecutive elements of a leaf the one at a random place r_t:

        params[j B + r_t[j]] <- mean of all replicas' y[j B + r_t[j]],   j = 0, 1, ...

    Other elements of params are those of y. All replicas draw the same places from `seed` and t, so
    no places are sent. As `base` of `js.slowmo` it is SPARTA-DiLoCo, in the authors' program with
    `momentum=0.9, slow_learning_rate=0.7, nesterov=True`.

    Args:
      axis_name: mapped axis of the replicas.
      share: share of the elements that an exchange averages, in (0, 1]; B is 1 / `share`, rounded.
      sync_every: period of the exchange in updates, or `js.every(...)`.
      seed: seed of the places, an int >= 0, equal on all replicas.
      local_axis_name: axis of the devices inside a replica, as in `js.local_sgd`.
      bucket_bytes: size at which a buffer is complete, in bytes; see `js.local_sgd`.
      codec: None sends parameters in their own dtypes, `js.codecs.float16()` in 16 bits.

    Returns:
      A `ParameterTransform` without a state of its own.

    Raises:
      ValueError: `share` outside (0, 1], `sync_every` < 1, a negative `seed`, an invalid `codec`,
        at construction; at trace time an unbound axis, missing params, non-float leaves (named).
      UserWarning: once, if the axis has size 1.

    Communication: in a due update one all-reduce over `axis_name` per buffer of the drawn elements,
      N * `share` bytes in total, N in the sent dtypes; nothing otherwise.

    Source: Beton et al., "SPARTA", MCDC at ICLR 2025; github.com/exo-explore/gym, `sparta.py`.
    """
    owner = "sparta"
    share = checked_share(owner, "share", share)
    group = checked_group(owner, axis_name, local_axis_name, bucket_bytes, codec)
    check_sends_parameters(owner, codec)
    if codec is not None and codec.error_feedback:
        raise ArgumentError(
            "codec",
            f"{owner}: `codec` must have no error feedback, since the next exchange sends other "
            f"elements, got {codec!r}.",
        )
    seed = checked_int(f"{owner}: `seed`", seed, 0)
    run = functools.partial(_average, block=round(1 / share), seed=seed)
    event = Event("sample", as_schedule(sync_every), run, group)
    return ParameterTransform(Algorithm((event,), (group,), owner=owner))


def _average(
    carry: Carry, replicas: ReplicaGroup, context: UpdateContext, *, block: int, seed: int
) -> Carry:
    """Average one element of every `block`."""
    dtypes = [x.dtype for x in jax.tree.leaves(carry.before)]  # in which parameters are sent

    # Each device draws from its own part of a leaf.
    def run(
        group: ReplicaGroup, tree: PyTree, count: jax.Array, weight: jax.Array | None
    ) -> list[PyTree]:
        leaves, treedef = jax.tree.flatten(tree)
        flats = [x.reshape(-1) for x in leaves]
        places = [_places(x.size, count, block, seed) for x in flats]
        sample = [
            cast(x.at[at].get(mode="fill", fill_value=0), dtype)
            for x, at, dtype in zip(flats, places, dtypes, strict=True)
        ]
        means = group.mean(sample, weight, role="sample")
        new = [
            x.at[at].set(cast(mean, x.dtype), mode="drop").reshape(leaf.shape)
            for x, at, mean, leaf in zip(flats, places, means, leaves, strict=True)
        ]
        return [treedef.unflatten(new)]

    y, whole = replicas.local(carry.params), [P()]
    count, weight = (replicas.local(x, whole) for x in (context.count, context.weight))
    params = replicas.run(run, [y, count, weight], y, packs=True)[0]
    with jax.named_scope(MODEL_STATE):
        means = replicas.plain.mean(carry.statistics, context.weight)
    return carry._replace(params=params, statistics=means)


def _places(size: int, count: jax.Array, block: int, seed: int) -> jax.Array:
    """Return a place in each block of consecutive elements; one beyond the end stands for none."""
    # Of this kind of key all replicas draw the same, on devices and under vmap.
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), count)
    starts = jnp.arange(0, size, block, dtype=jnp.int32)
    return starts + jax.random.randint(key, starts.shape, 0, block, jnp.int32)
