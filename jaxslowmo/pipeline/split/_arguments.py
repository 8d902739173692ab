"""One argument of a stage: its tree and types, and which of its leaves have cotangents."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..._typing import PyTree
from ...mesh import cast_varying, varying_axes
from ._jaxpr import type_of


@dataclass(frozen=True)
class Argument:
    """A tree of arrays as it was when the stage was traced."""

    name: str
    tree: Any  # its structure
    types: tuple[Any, ...]
    chosen: tuple[bool, ...]  # leaves that have cotangents

    @classmethod
    def of(cls, name: str, value: PyTree) -> "Argument":
        """The argument `name`, of arrays or their types; floating leaves have cotangents."""
        leaves, tree = jax.tree.flatten(value)
        types = tuple(map(type_of, leaves))
        return cls(name, tree, types, tuple(map(is_differentiable, types)))

    @property
    def num_chosen(self) -> int:
        """How many leaves have cotangents."""
        return sum(self.chosen)

    def flat(self, value: PyTree) -> list[Any]:
        """Leaves of `value`, which must be what was traced."""
        leaves, tree = jax.tree.flatten(value)
        if tree != self.tree:
            raise ValueError(f"`{self.name}` must be the tree {self.tree}, as traced, got {tree}.")
        pairs = enumerate(zip(self.types, leaves, strict=True))
        return [self._as_traced(i, wanted, leaf) for i, (wanted, leaf) in pairs]

    def cotangents(self, value: PyTree) -> list[Any]:
        """Cotangents of the chosen leaves, from a tree like this; None stands for zeros."""
        try:
            leaves = self.tree.flatten_up_to(value)
        except ValueError as error:
            raise ValueError(
                f"`d{self.name}` must be a tree like `{self.name}`, {self.tree}: {error}"
            ) from None
        given = enumerate(zip(self.types, self.chosen, leaves, strict=True))
        return [
            self._as_traced(i, wanted, jnp.zeros(wanted.shape, wanted.dtype) if x is None else x)
            for i, (wanted, chosen, x) in given
            if chosen
        ]

    def select(self, leaves: Sequence[Any]) -> list[Any]:
        """The chosen ones of all `leaves`."""
        return [leaf for leaf, chosen in zip(leaves, self.chosen, strict=True) if chosen]

    def merge(self, leaves: Sequence[Any], chosen: Sequence[Any]) -> PyTree:
        """The tree of `leaves`, the chosen ones taken from `chosen`."""
        instead = iter(chosen)
        pairs = zip(leaves, self.chosen, strict=True)
        return self.tree.unflatten([next(instead) if take else leaf for leaf, take in pairs])

    def gradients(self, values: Sequence[Any]) -> PyTree:
        """The tree of cotangents: `values` of the chosen leaves, None for the others."""
        return self.merge([None] * len(self.chosen), values)

    def _as_traced(self, i: int, wanted: Any, x: Any) -> Any:
        """Leaf `i` with the type it was traced with, if it can have that without arithmetic."""
        x = jnp.asarray(x, wanted.dtype) if isinstance(x, int | float | complex) else x
        shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", type(x).__name__)
        if shape != wanted.shape or dtype != wanted.dtype:
            got = dtype if shape is None else f"{dtype}{list(shape)}"
            expected = wanted.str_short(short_dtypes=False)
            raise ValueError(
                f"`{self.name}`: leaf {i} must be {expected}, as the stage was traced, got {got}."
            )
        varying = varying_axes(x)
        if more := varying - varying_axes(wanted):
            axes = ", ".join(map(repr, sorted(more)))
            raise ValueError(
                f"`{self.name}`: leaf {i} varies over {axes}, but did not when "
                "the stage was traced: give `split_stage` arrays that vary over all axes that "
                "those of the calls do (`jax.lax.pcast(x, axes, to='varying')`)."
            )
        return cast_varying(x, varying_axes(wanted) - varying)


def is_differentiable(x: Any) -> bool:
    """Whether an array or type has cotangents: floating and complex ones do."""
    return jnp.issubdtype(x.dtype, jnp.inexact)
