"""Synchronisation works on each device's own block of every leaf.

On a pure data-parallel mesh the block is the leaf. Where leaves are sharded over automatic axes
inside a replica (FSDP, tensor parallel), a nested `shard_map` over those axes hands the exchange
local blocks, so that it gathers nothing over them.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from .._typing import AxisName, PyTree
from ..collectives import all_mean, all_mean_in_slices
from ..tree import plan_buffers


def check_bucket_bytes(owner: str, bucket_bytes: int | None) -> None:
    """Raise `ValueError` for a negative size."""
    if bucket_bytes is not None and bucket_bytes < 0:
        raise ValueError(
            f"{owner}: `bucket_bytes` is a size in bytes and must be >= 0, got {bucket_bytes}."
        )


def bucket_limits(bucket_bytes: int | None) -> tuple[int, ...] | None:
    """Limits for `plan_buffers`: one buffer per dtype for None."""
    return None if bucket_bytes is None else (bucket_bytes,)


def replica_mean(
    tree: PyTree,
    axis_name: AxisName,
    local_axis_name: AxisName | None,
    bucket_bytes: int | None,
) -> PyTree:
    """Mean of a tree over `axis_name`, through flat buffers, in the leaves' dtypes.

    Communication: one all-reduce per buffer over `axis_name`; with `local_axis_name` 1/L of each
    per device, and an all-gather over that axis.
    """
    plan = plan_buffers(tree, limits=bucket_limits(bucket_bytes))
    if local_axis_name is None:
        return plan.unpack([all_mean(flat, axis_name) for flat in plan.pack(tree)])
    return plan.unpack(
        [all_mean_in_slices(flat, axis_name, local_axis_name) for flat in plan.pack(tree)]
    )


def spec_axes(param_specs: PyTree | None) -> tuple[str, ...]:
    """Mesh axes that `param_specs` name, in order of appearance."""
    axes: dict[str, None] = {}
    for spec in jax.tree.leaves(param_specs, is_leaf=lambda s: isinstance(s, P)):
        for entry in spec:
            for name in entry if isinstance(entry, tuple) else (entry,):
                if name is not None:
                    axes[name] = None
    return tuple(axes)


def _automatic(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `axes` that the compiler still handles here; manual ones are blocks already."""
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    unknown = [a for a in axes if a not in types]
    if unknown:
        raise ValueError(
            f"`param_specs` names axis {unknown[0]!r}, which the mesh here does not have "
            f"(axes: {', '.join(map(repr, mesh.axis_names)) or 'none'})."
        )
    return tuple(a for a in axes if types[a] != AxisType.Manual)


def on_local_blocks(
    fn: Callable[..., Any],
    param_specs: PyTree | None,
    *args: PyTree,
    in_specs: tuple[Any, ...] | None = None,
    out_specs: Any = None,
) -> Any:
    """Call `fn` on the device's own blocks of `args`.

    Args:
      fn: function of trees, may use the replica axes.
      param_specs: specs of parameter-like trees; None calls `fn` directly.
      *args: trees.
      in_specs: spec of each argument, default `param_specs`; the string `"flat"` stands for arrays
        whose leading dimension is split over all axes of `param_specs`.
      out_specs: likewise for the result.
    """
    axes = _automatic(spec_axes(param_specs)) if param_specs is not None else ()
    if not axes:
        return fn(*args)

    def resolve(spec: Any) -> Any:
        return P(axes) if isinstance(spec, str) else spec

    return jax.shard_map(
        fn,
        in_specs=tuple(resolve(s) for s in in_specs or (param_specs,) * len(args)),
        out_specs=resolve(param_specs if out_specs is None else out_specs),
        axis_names=set(axes),
    )(*args)
