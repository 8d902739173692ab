"""Sharding of the leaves and activations of a `GPT` over axes inside a replica.

Dimensions have logical names, as in flax (`out_sharding` of its variables). Rules, which are pairs
of a name and mesh axes, turn these names into a `PartitionSpec`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from ..._support.checks import ArgumentError
from ..._support.extras import needed_by

with needed_by("jaxslowmo.models"):
    from flax.core.spmd import get_logical_axis_rules
    from flax.linen.spmd import logical_to_mesh_axes, with_logical_constraint
    from flax.nnx.nn.dtypes import promote_dtype

Names = Sequence[str | None]
AxisSizes = Mapping[str, int]
MeshAxes = str | tuple[str, ...] | None
Rules = Sequence[tuple[str, MeshAxes]]
"""Rules as in flax: the first rule of a name whose axes are free in an array applies."""

GPT_RULES: Rules = (
    ("batch", "fsdp"),  # rows of activations
    ("embed", "fsdp"),  # the width of the residual stream, in matrices and in the positions
    ("qkv", "tensor"),  # columns of the product before attention,
    ("heads", "tensor"),  # its heads, and the rows of the product after attention
    ("mlp", "tensor"),  # the width inside an MLP
    ("vocab", "tensor"),
    ("position", None),
    ("norm", None),  # vectors as wide as the residual stream
)
"""Sharding rules: a block over "tensor" as in Megatron, the rest of each matrix over "fsdp"."""


def gpt_rules(mesh: Any) -> Rules:
    """Return `GPT_RULES` for a mesh: dimensions whose axis the mesh lacks are not split.

    Args:
      mesh: mesh with axes "fsdp" and "tensor", or one of them.

    Returns:
      Rules for `gpt_param_specs` and `gpt_loss_fn`.

    Raises:
      ValueError: a mesh with neither axis.
    """
    rules = tuple((name, axis if axis in mesh.shape else None) for name, axis in GPT_RULES)
    if not any(axis for _, axis in rules):
        raise ValueError(
            'gpt_rules: `mesh` must have an axis "fsdp" or "tensor" to split a model over, got '
            f"{dict(mesh.shape)}; name your own in `rules`."
        )
    return rules


def checked_rules(rules: Rules, axis_sizes: AxisSizes) -> Rules:
    """Return `rules` after checking that a GPT has their names and the mesh has their axes.

    Raises:
      ValueError: other names or axes.
    """
    names = {name for name, _ in GPT_RULES}
    for rule in rules:
        if not isinstance(rule, tuple) or len(rule) != 2:
            raise ArgumentError(
                "rules", f"`rules` must hold pairs of a name and axes of the mesh, got {rule!r}."
            )
        name, axes = rule
        if name not in names:
            raise ArgumentError(
                "rules",
                f"`rules` names {name!r}, which no dimension of a GPT is called: those are "
                f"{', '.join(sorted(names))}.",
            )
        if unknown := [axis for axis in _axes(axes) if axis not in axis_sizes]:
            raise ArgumentError(
                "rules",
                f"`rules` splits {name!r} over {unknown[0]!r}, and the mesh has the axes "
                f"{', '.join(map(repr, axis_sizes))}.",
            )
    return tuple(rules)


def partition_spec(
    what: str, names: Names, shape: Sequence[int], rules: Rules, axis_sizes: AxisSizes
) -> P:
    """Return the spec of an array whose dimensions have these names.

    Raises:
      ValueError: a dimension that its axes do not divide.
    """
    spec = logical_to_mesh_axes(tuple(names), tuple(rules))
    assert spec is not None, "the array has names"
    for name, size, axes in zip(names, shape, spec, strict=True):
        parts = math.prod(axis_sizes[axis] for axis in _axes(axes))
        if size % parts:
            raise ArgumentError(
                "rules",
                f"`rules` splits {name!r} over {axes!r}, {parts} devices, which must divide it: "
                f"{what} has {size}.",
            )
    whole = len(spec) - next((i for i, axes in enumerate(spec[::-1]) if axes), len(spec))
    return P(*spec[:whole])


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Return `x` with the layout of the active rules (`flax.nnx.logical_axis_rules`), if any."""
    rules, mesh = get_logical_axis_rules(), jax.sharding.get_abstract_mesh()
    return constrain_by_rules(x, names, rules, mesh) if rules and not mesh.empty else x


def gather_kernel(kernel: jax.Array, *names: str) -> jax.Array:
    """Return a matrix, whole along the width of the residual stream, for all products that use it.

    Otherwise XLA plans a gather for every product. Compilers for GPUs run all of them, even where
    several gather the same matrix: in a GPT over "fsdp" and "tensor" a quarter of the gathered
    bytes, and nearly half without rematerialisation (jax 0.10.2 and 0.12).

    Communication: none; under active rules the compiler gathers `kernel` along the axes of "embed".
    """
    return constrain(kernel, *(None if name == "embed" else name for name in names))


@dataclasses.dataclass(frozen=True)
class PromoteAndGather:
    """The function `promote_dtype` of a linear layer that gathers its kernel in the compute dtype.

    Attributes:
      names: names of the kernel's dimensions.
    """

    names: tuple[str, str]

    def __call__(self, arrays: Any, /, *, dtype: Any = None, inexact: bool = True) -> Any:
        inputs, kernel, bias = promote_dtype(arrays, dtype=dtype, inexact=inexact)
        return inputs, gather_kernel(kernel, *self.names), bias


def constrain_by_rules(x: jax.Array, names: Names, rules: Rules, mesh: AbstractMesh) -> jax.Array:
    """Return `x`, laid out over a mesh by rules for the names of its dimensions.

    Axes that are not automatic are ignored: along them `x` is this device's part already.

    Raises:
      ValueError: rules that do not fit the mesh, or `x`.
    """
    automatic = set(mesh.auto_axes)
    automatic_rules = [
        (name, tuple(axis for axis in _axes(axes) if axis in automatic) or None)
        for name, axes in checked_rules(rules, mesh.shape)
    ]
    partition_spec(f"an array of the shape {x.shape}", names, x.shape, automatic_rules, mesh.shape)
    return with_logical_constraint(x, names, rules=automatic_rules)


def _axes(axes: MeshAxes) -> tuple[str, ...]:
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)
