"""Ways to make one displacement of all replicas' displacements, other than their mean."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ..._support.checks import ArgumentError, as_number
from ..._support.types import PyTree
from ...collectives import quotient, scale
from ...collectives.codecs import Codec
from ...transform import ReplicaGroup
from ...tree import leaf_names


@dataclass(frozen=True)
class RadialDirectional:
    """The mean direction of the displacements with their mean norm; made by `rda`."""

    where: Callable[[str], bool] | None = None

    def combine(self, v: PyTree, mass: jax.Array | None, replicas: ReplicaGroup) -> PyTree:
        """Return the displacement of all replicas, from this one's `v` and its weight `mass`."""
        leaves, treedef = jax.tree.flatten(v)
        chosen = [self.where is None or self.where(name) for name in leaf_names(v)]
        norms = [jnp.sqrt(jnp.sum(jnp.square(x))) for x in leaves]
        # Decoupled DiLoCo, of a leaf with displacements v and weights w of the replicas:
        #   (sum w |v| / sum w) unit(sum w unit(v)),  unit(v) = v / |v|
        parts = [quotient(x, n) if c else x for x, n, c in zip(leaves, norms, chosen, strict=True)]
        # Without weights there is no number 1: a constant is not sharded over Explicit axes as
        # norms are, and would not stack with them.
        weights = [] if mass is None else [mass]
        parts = [scale(x, mass) for x in parts] if mass is not None else parts
        numbers = [n if mass is None else scale(n, mass) for n in norms] + weights
        numbers = jnp.stack([n.astype(jnp.float32) for n in numbers])
        radii = [*replicas.plain.mean_number(numbers)]
        total = None if mass is None else radii.pop()
        means = replicas.mean_scatter(treedef.unflatten(parts), role="slow")
        out = []
        for x, radius, is_radial in zip(jax.tree.leaves(means), radii, chosen, strict=True):
            if is_radial:
                x = quotient(x, jnp.sqrt(jnp.sum(jnp.square(x)))) * radius.astype(x.dtype)
            out.append(x if total is None else quotient(x, total))
        return treedef.unflatten(out)


@dataclass(frozen=True)
class NormWeighted:
    """Weights of replicas by the norms of their displacements; made by `norm_weighted`."""

    max_ratio: float = 10.0
    damping: float = 0.0

    def factors(self, norms: Any) -> Any:
        """Return the factors of the replicas' weights, of their norms; NaN marks one left out.

        Args:
          norms: (replicas,) floats of NumPy, or of jax.
        """
        xp: Any = np if isinstance(norms, np.ndarray) else jnp
        counts = xp.isfinite(norms)
        usual = xp.nanmedian(xp.where(counts, norms, xp.nan))
        ratio = xp.where(counts & (usual > 0), norms / xp.where(usual > 0, usual, 1), 1)
        damped = xp.exp(-self.damping * (ratio - 1))
        return xp.where(counts & (ratio <= self.max_ratio), damped, 0)

    def factor(self, v: PyTree, mass: jax.Array | None, replicas: ReplicaGroup) -> jax.Array:
        """Return the factor of this replica's weight, () float32, of its displacement.

        Communication: one all-gather of a number.
        """
        squares = [jnp.sum(jnp.square(x)).astype(jnp.float32) for x in jax.tree.leaves(v)]
        norm = jnp.sqrt(jnp.sum(jnp.stack(squares)))
        norm = norm if mass is None else jnp.where(mass > 0, norm, jnp.nan)
        index, norms = replicas.plain.all_numbers(norm)
        return self.factors(norms)[index]


Aggregate = Literal["mean", "rda"] | RadialDirectional | NormWeighted
"""How the displacements of replicas become one."""


def rda(*, where: Callable[[str], bool] | None = None) -> RadialDirectional:
    """Return `aggregate` for radial-directional averaging, of norms and directions separately.

    With the displacements v = anchor - y of the replicas and their weights w, of each leaf:

        D = (sum w |v| / sum w) * unit(sum w unit(v)),   unit(v) = v / |v|

    The mean of displacements in different directions is short; D is as long as they are. Where all
    cancel, D is 0; a leaf of one element moves by the vote of the signs.

    Args:
      where: function from a leaf's name, such as "block0/kernel", to whether this holds for it;
        others have the mean, as embeddings should. None: all leaves.

    Returns:
      The argument `aggregate` of `js.diloco`; `"rda"` is that of all leaves.

    Raises:
      ValueError: `where` that is no function.

    Communication: in an outer step 4 bytes for each leaf, besides what the mean sends.

    Source: Douillard et al., "Decoupled DiLoCo for Resilient Distributed Pre-training", 2026,
      arXiv 2604.21428.
    """
    if where is not None and not callable(where):
        raise ArgumentError(
            "where", f"rda: `where` must be a function from a leaf's name to a bool, got {where!r}."
        )
    return RadialDirectional(where)


def norm_weighted(*, max_ratio: float = 10.0, damping: float = 0.0) -> NormWeighted:
    """Return `aggregate` by which replicas that moved much further than others count less.

    With the displacements v = anchor - y, a replica's weight in the mean is multiplied by

        0 if r > max_ratio, else exp(-damping (r - 1)),   r = |v| / (median of the replicas' |v|)

    Replicas without weight are not in the median. One whose displacement is not finite counts 0,
    too; it goes on from the anchor, as all do. Without any that counts the anchor stays.

    Args:
      max_ratio: largest norm that counts, in medians, >= 1.
      damping: how much less a longer displacement counts, and a shorter one more, >= 0.

    Returns:
      The argument `aggregate` of `js.diloco`. Programs that exchange through a store have the
      first rule as `max_norm_ratio` of `js.islands.join`.

    Raises:
      ValueError: `max_ratio` < 1 or `damping` < 0.

    Communication: in an outer step an all-gather of 4 bytes, besides what the mean sends.

    Source: Cheng et al., "EDiT: A Local-SGD-Based Efficient Distributed Training Method for Large
      Language Models", ICLR 2025, arXiv 2412.07210; there each module has its own weights
      exp(-|v|), and outliers are those of a replica's own past.
    """
    for name, value, least in (("max_ratio", max_ratio, 1), ("damping", damping, 0)):
        number = as_number(value)
        if number is None or number < least:
            raise ArgumentError(
                name, f"norm_weighted: `{name}` must be a number >= {least}, got {value!r}."
            )
    return NormWeighted(float(max_ratio), float(damping))


def checked_aggregate(
    owner: str, aggregate: Any, *, shard_state: bool | None, codec: Codec | None, delay: int
) -> RadialDirectional | NormWeighted | None:
    """Return how displacements become one; None: by their mean.

    Raises:
      ValueError: an unknown `aggregate`, or another argument that does not go with it.
    """
    if isinstance(aggregate, str) and aggregate in ("mean", "rda"):
        aggregate = None if aggregate == "mean" else RadialDirectional()
    elif not isinstance(aggregate, RadialDirectional | NormWeighted):
        raise ArgumentError(
            "aggregate",
            f'{owner}: `aggregate` must be "mean", "rda", js.rda(...) or js.norm_weighted(...), '
            f"got {aggregate!r}.",
        )
    refused = {"shard_state": aggregate is not None and shard_state is True}
    if isinstance(aggregate, RadialDirectional):
        refused |= {"codec": codec is not None, "delay": delay != 0}
    for name in (name for name, is_refused in refused.items() if is_refused):
        raise ArgumentError(
            name,
            f"{owner}: `{name}` does not go with `aggregate`={aggregate!r}, which takes the whole "
            "displacement of a replica as it is.",
        )
    return aggregate
