"""DLRM in flax nnx, without its tables: these are `js.embeddings`.

Naumov et al. 2019, "Deep Learning Recommendation Model for Personalization and Recommendation
Systems", figure 1. What was looked up in the tables is an argument.
"""

import itertools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


class MLP(nnx.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, widths: Sequence[int], *, rngs: nnx.Rngs) -> None:
        pairs = itertools.pairwise(widths)
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in pairs])

    def __call__(self, x: jax.Array) -> jax.Array:
        """(n, widths[0]) to (n, widths[-1])."""
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)


class DLRM(nnx.Module):
    """Vectors of what is dense and of each sparse feature, their products, and an MLP on top."""

    def __init__(
        self,
        num_dense: int,
        num_features: int,
        dim: int,
        *,
        bottom: Sequence[int] = (64,),
        top: Sequence[int] = (64, 32),
        rngs: nnx.Rngs,
    ) -> None:
        vectors = 1 + num_features
        self.bottom = MLP((num_dense, *bottom, dim), rngs=rngs)
        self.top = MLP((dim + vectors * (vectors - 1) // 2, *top, 1), rngs=rngs)

    def __call__(self, dense: jax.Array, embedded: Mapping[str, jax.Array]) -> jax.Array:
        """Logits (n,) from dense columns (n, num_dense) and vectors {feature: (n, dim)}."""
        x = nnx.relu(self.bottom(dense))
        vectors = jnp.stack([x, *(embedded[name] for name in sorted(embedded))], axis=1)
        products = jnp.einsum("nid,njd->nij", vectors, vectors)
        one, other = np.triu_indices(vectors.shape[1], k=1)
        return self.top(jnp.concatenate([x, products[:, one, other]], axis=1))[:, 0]
