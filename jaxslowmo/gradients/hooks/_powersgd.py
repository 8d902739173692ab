"""PowerSGD: matrices are sent as the product of two matrices with few columns."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._support.checks import checked_int, checks_flags
from ..._support.types import PyTree
from ...collectives import all_mean
from ...mesh import axis_names
from ...transform import phase_scope, run_if
from ...tree import at_least_float32
from .._hook import CommHook, GradBucket

_OWNER = "powersgd"
# Largest number of columns for Gram-Schmidt, which is a few operations; a QR decomposition is a
# library call on most backends.
_FEW_COLUMNS = 2


class PowerSGDState(NamedTuple):
    """State of `powersgd` for one bucket: one entry per shape (n, m) that is compressed."""

    error: tuple[jax.Array, ...]  # (matrices, n, m), this replica's residuals; or ()
    q: tuple[jax.Array, ...]  # (matrices, m, r), last factors, equal on all replicas; or ()


class _Matrices(NamedTuple):
    """The matrices of one shape in a bucket; they are computed together."""

    members: tuple[int, ...]  # positions among the bucket's pieces
    rows: int
    columns: int
    rank: int


@checks_flags("hooks.powersgd")
def powersgd(
    rank: int = 1,
    start_step: int = 1000,
    *,
    error_feedback: bool = True,
    warm_start: bool = True,
    min_compression_rate: float = 2.0,
    seed: int = 0,
) -> CommHook:
    """Make a hook that sends each gradient matrix as two factors, P and Q, of r columns (PowerSGD).

    The first `start_step` updates use the plain mean. Then every gradient is an (n, m) matrix, n
    its first dimension: Q of the previous update is made orthonormal, P = mean(M Q) is made
    orthonormal, Q = mean(M^T P), and the reduced gradient is P Q^T. That is one step of a power
    iteration towards the best approximation of the mean. What this replica's M lost is added to its
    next one.

    A matrix is compressed where that saves enough: (n + m) r `min_compression_rate` < n m; vectors
    rarely are. The others get their plain mean.

    Args:
      rank: largest r; r is also at most n and m. 1 or 2 are usual, 4 and more for hard cases.
      start_step: number of first updates with the plain mean, while gradients change fast. At
        least 2 with error feedback or warm start.
      error_feedback: keep what was lost and add it to the next gradient; without it training may
        not converge.
      warm_start: whether Q starts as that of the previous update, so that the approximation
        improves from update to update; otherwise it is random in each update.
      min_compression_rate: compress where the factors are smaller by more than this; 0 compresses
        all matrices.
      seed: seed of the random Q, which is equal on all replicas.

    Returns:
      A `CommHook` with a `PowerSGDState` per bucket: errors of the size of the compressed
      gradients, and factors. For half precision, state and arithmetic are float32, and only
      messages are in half precision (products may overflow float16: prefer bfloat16). An update
      with an inf or NaN in a compressed gradient gives NaN on all replicas and leaves the state as
      it was. Leaves cut by `split_large` are vectors: they are not compressed.
      Errors differ between replicas: in `js.make_train_step` all axes that the hook reduces over
      must be in its `axis_name`.

    Raises:
      ValueError: an argument out of its range.

    Communication: per bucket up to update `start_step` one all-reduce of it (kind "warm_up" in
      `js.comm_report`); then (kind "powersgd") at most three, in its dtype: of the gradients that
      are not compressed, of all P (n r elements per matrix), and of all Q (m r).

    Source: Vogels et al., "PowerSGD", NeurIPS 2019; torch 2.13, `powerSGD_hook`.
    """
    rank, seed = checked_int(f"{_OWNER}: `rank`", rank, 1), checked_int(f"{_OWNER}: `seed`", seed)
    least = 2 if error_feedback or warm_start else 0
    start_step = checked_int(f"{_OWNER}: `start_step`", start_step, least)

    def matrices(bucket: GradBucket) -> list[_Matrices]:
        return _matrices(bucket, rank, min_compression_rate)

    def draw_factors(bucket: GradBucket, count: Any) -> tuple[jax.Array, ...]:
        work = at_least_float32(bucket.dtype)
        shapes = [(len(g.members), g.columns, g.rank) for g in matrices(bucket)]
        drawn = [draw_normal(seed, count, bucket.index, i, x) for i, x in enumerate(shapes)]
        return tuple(x.astype(work) for x in drawn)

    def init(bucket: GradBucket) -> PyTree:
        shapes = [(len(g.members), g.rows, g.columns) for g in matrices(bucket)]
        work = at_least_float32(bucket.dtype)
        error = tuple(jnp.zeros(shape, work) for shape in shapes if error_feedback)
        return PowerSGDState(error, draw_factors(bucket, 0) if warm_start else ())

    def warm_up(bucket: GradBucket, state: PowerSGDState) -> tuple[jax.Array, PowerSGDState]:
        with phase_scope("warm_up"):
            return all_mean(bucket.flat, bucket.axis_name), state

    def compress(bucket: GradBucket, state: PowerSGDState) -> tuple[jax.Array, PowerSGDState]:
        with phase_scope("powersgd"):
            first_q = state.q if warm_start else draw_factors(bucket, bucket.count)
            flat, lost, q = _low_rank_mean(bucket, matrices(bucket), state.error, first_q)
            after = PowerSGDState(lost if error_feedback else (), q if warm_start else ())
        # One overflow must not stay in the residuals. The reduced bucket is equal on all replicas,
        # so all make the same choice.
        sound = jnp.all(jnp.isfinite(flat))
        return flat, jax.tree.map(lambda new, old: jnp.where(sound, new, old), after, state)

    def update(bucket: GradBucket, state: PyTree) -> tuple[jax.Array, PyTree]:
        if not matrices(bucket):
            return all_mean(bucket.flat, bucket.axis_name), state
        assert bucket.count is not None
        return run_if(
            bucket.count > start_step if start_step else True,
            lambda x: compress(bucket.replace(x[0]), x[1]),
            lambda x: warm_up(bucket.replace(x[0]), x[1]),
            (bucket.flat, state),
            axes=axis_names(bucket.axis_name),
        )

    return CommHook(init, update)


def draw_normal(
    seed: int, count: Any, bucket_index: int, index: int, shape: tuple[int, ...]
) -> jax.Array:
    """Return normal numbers for the factors of one shape; `count` is 0 in `init`."""
    key = jax.random.key(seed, impl="threefry2x32")  # equal on every backend
    for part in (bucket_index, index, count):
        key = jax.random.fold_in(key, part)
    return jax.random.normal(key, shape, jnp.float32)


def _matrices(bucket: GradBucket, rank: int, min_compression_rate: float) -> list[_Matrices]:
    """Return the matrices to compress, grouped by shape in the order in which shapes appear."""
    by_shape: dict[tuple[int, int], list[int]] = {}
    for place, piece in enumerate(bucket.pieces):
        size, shape = math.prod(piece.part_shape), piece.part_shape or (1,)
        if size:
            by_shape.setdefault((shape[0], size // shape[0]), []).append(place)
    return [
        _Matrices(tuple(members), n, m, r)
        for (n, m), members in by_shape.items()
        if (n + m) * (r := min(n, m, rank)) * min_compression_rate < n * m
    ]


def _low_rank_mean(
    bucket: GradBucket,
    groups: list[_Matrices],
    errors: tuple[jax.Array, ...],
    first_q: tuple[jax.Array, ...],
) -> tuple[jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Return the reduced bucket, what this replica lost in it, and the last factors Q.

    Communication: at most three all-reduces over `bucket.axis_name`, in the bucket's dtype.
    """
    parts, work = bucket.split(bucket.flat), at_least_float32(bucket.dtype)
    inside = {place for g in groups for place in g.members}
    outside = [place for place in range(len(parts)) if place not in inside]
    if outside:
        # Their means are exact. (torch also keeps their difference to the mean as an error. It adds
        # up to 0 over replicas: it changes no mean, but grows and costs precision.)
        for i, mean in zip(outside, _means(bucket, [parts[i] for i in outside]), strict=True):
            parts[i] = mean
    local = [
        jnp.stack([parts[i].reshape(g.rows, g.columns) for i in g.members]).astype(work)
        for g in groups
    ]
    local = [m + error for m, error in zip(local, errors, strict=True)] if errors else local
    p = [_multiply("bnm,bmr->bnr", m, orthogonal(q)) for m, q in zip(local, first_q, strict=True)]
    p = [orthogonal(x) for x in _means(bucket, p)]
    q = _means(bucket, [_multiply("bnm,bnr->bmr", m, x) for m, x in zip(local, p, strict=True)])
    lost = []
    for g, m, x, y in zip(groups, local, p, q, strict=True):
        product = _multiply("bnr,bmr->bnm", x, y).astype(bucket.dtype)
        lost.append(m - product.astype(work))
        for i, reduced in zip(g.members, product, strict=True):
            parts[i] = reduced
    return bucket.join(parts), tuple(lost), tuple(q)


def _multiply(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, precision=lax.Precision.HIGHEST)


def _means(bucket: GradBucket, arrays: list[jax.Array]) -> list[jax.Array]:
    """Return means of arrays over replicas, sent in the bucket's dtype.

    Communication: one all-reduce over `bucket.axis_name`.
    """
    packed = jnp.concatenate([x.reshape(-1) for x in arrays]).astype(bucket.dtype)
    parts = jnp.split(all_mean(packed, bucket.axis_name), np.cumsum([x.size for x in arrays])[:-1])
    return [part.reshape(x.shape).astype(x.dtype) for part, x in zip(parts, arrays, strict=True)]


def orthogonal(x: jax.Array) -> jax.Array:
    """Return orthonormal columns that span those of each matrix.

    Args:
      x: (matrices, n, r) float32, r <= n.

    Returns:
      The same shape. Up to 2 columns: one that depends on those before it, to the last bit, is 0;
      with more columns an orthonormal complement takes its place.

    Communication: none.
    """
    if x.shape[-1] > _FEW_COLUMNS:
        return jnp.linalg.qr(x)[0]
    columns: list[jax.Array] = []
    for i in range(x.shape[-1]):
        column = _unit(x[..., i])
        # Twice: the rest of a nearly dependent column is rounding noise, which again has a part
        # along the earlier columns.
        for _ in range(2 if columns else 0):
            for other in columns:
                column = column - jnp.sum(column * other, axis=-1, keepdims=True) * other
            column = _unit(column)
        columns.append(column)
    return jnp.stack(columns, axis=-1)


def _unit(x: jax.Array) -> jax.Array:
    """Return rows (matrices, n) of length 1, or 0 for zero rows; works for tiny and huge rows."""
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    x = x / jnp.where(largest == 0, 1, largest)
    norm = jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))
    return x / jnp.where(norm == 0, 1, norm)
