"""The optimizers of all stages, and what couples them: one norm, and whether all is finite."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from ..._typing import PyTree
from ...mesh import map_replicas
from ...tree import apply_exactly
from ._submeshes import SubMesh


class Updates:
    """One optimizer per stage of the model, on the devices of its stage.

    Args:
      txs: the chain of every stage.
      at: the devices of every stage of the model.
      counted: per stage, for each of its leaves, whether it counts in the norm: of copies of one
        parameter one does.
      max_norm: what the norm of a replica's gradients over all stages is clipped to; None: not.
      only_finite: whether an update is left out on all replicas and stages where one gradient of
        any of them is not finite.
      donate: whether parameters and optimizer state are updated in place.
    """

    def __init__(
        self,
        txs: Sequence[optax.GradientTransformation],
        at: Sequence[SubMesh],
        counted: Sequence[Sequence[bool]],
        *,
        max_norm: float | None,
        only_finite: bool,
        donate: bool,
    ) -> None:
        self._at = at
        self._max_norm, self._only_finite = max_norm, only_finite
        self._couples = max_norm is not None or only_finite
        self._facts = [jax.jit(partial(_facts, counted=tuple(c))) for c in counted]
        self._update = [
            jax.jit(self._mapped(tx, each), donate_argnums=(0, 1) if donate else ())
            for tx, each in zip(txs, at, strict=True)
        ]

    def __call__(
        self, params: Sequence[PyTree], states: Sequence[PyTree], grads: Sequence[PyTree]
    ) -> tuple[list[PyTree], list[PyTree], jax.Array | None]:
        """New parameters and states of all stages, and the norm per replica where it was asked for.

        Communication: the transforms'; with a norm or a check 8 bytes per replica and stage, to
        the first stage and back.
        """
        facts = self._over_all_stages(grads) if self._couples else None
        new_params, new_states = [], []
        for k, at in enumerate(self._at):
            known = jax.device_put(facts, at.whole)
            own = self._update[k](params[k], states[k], grads[k], known)
            new_params.append(own[0])
            new_states.append(own[1])
        norm = None if facts is None or self._max_norm is None else jnp.sqrt(facts[:, 0])
        return new_params, new_states, norm

    def _over_all_stages(self, grads: Sequence[PyTree]) -> jax.Array:
        """(replicas, 2): sum of squares, and how many stages hold what is not finite."""
        first = self._at[0].whole
        own = [jax.device_put(f(g), first) for f, g in zip(self._facts, grads, strict=True)]
        return _sum(own)

    def _mapped(self, tx: optax.GradientTransformation, at: SubMesh) -> Any:
        return map_replicas(
            partial(self._one, tx, at.replica_axis),
            mesh=at.mesh,
            axis_name=at.replica_axis,
            in_roles=("stacked", "stacked", "stacked", "shared"),
            out_roles="stacked",
            automatic=at.automatic,
        )

    def _one(
        self,
        tx: optax.GradientTransformation,
        axis: str,
        params: PyTree,
        state: PyTree,
        grads: PyTree,
        facts: jax.Array | None,
    ) -> tuple[PyTree, PyTree]:
        """One stage of one replica."""
        if facts is not None and self._max_norm is not None:
            grads = _clipped(grads, jnp.sqrt(facts[lax.axis_index(axis), 0]), self._max_norm)

        def updated() -> tuple[PyTree, PyTree]:
            updates, after = tx.update(grads, state, params)
            return apply_exactly(params, updates), after

        if facts is None or not self._only_finite:
            return updated()
        # Equal on all replicas, so that whatever `tx` exchanges all of them leave out together.
        return lax.cond(jnp.sum(facts[:, 1]) == 0, updated, lambda: (params, state))


def _facts(grads: PyTree, *, counted: tuple[bool, ...]) -> jax.Array:
    """(replicas, 2): of one stage's stacked gradients."""
    squares = finite = None
    for x, counts in zip(jax.tree.leaves(grads), counted, strict=True):
        wide = x.astype(jnp.float32).reshape(x.shape[0], -1)
        square = jnp.sum(wide**2, axis=1) if counts else jnp.zeros(x.shape[0])
        is_finite = jnp.all(jnp.isfinite(wide), axis=1)
        squares = square if squares is None else squares + square
        finite = is_finite if finite is None else finite & is_finite
    assert squares is not None
    assert finite is not None
    return jnp.stack([squares, 1.0 - finite.astype(jnp.float32)], axis=1)


def _clipped(grads: PyTree, norm: jax.Array, max_norm: float) -> PyTree:
    """As `optax.clip_by_global_norm` with that norm."""

    def clip(g: jax.Array) -> jax.Array:
        return jnp.where(norm < max_norm, g, (g / norm.astype(g.dtype)) * max_norm)

    return jax.tree.map(clip, grads)


@jax.jit
def _sum(parts: list[jax.Array]) -> jax.Array:
    return sum(parts[1:], start=parts[0])
