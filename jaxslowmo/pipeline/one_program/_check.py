"""What a pipeline refuses before it is traced."""

import math
import numbers
from collections.abc import Collection
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ..._typing import PyTree
from ...tree import leaf_names
from ..model import check_pipeline

BatchMemory = Literal["device", "host"]


def check_arguments(
    model: Any,
    schedule: Any,
    mesh: Any,
    axis_name: str,
    data_axes: tuple[str, ...],
    gradient_scale: float,
    batch_memory: str,
) -> None:
    """Raise `ValueError` for a model, a schedule, axes, a memory or a scale that cannot be."""
    check_pipeline(model, schedule)
    if not isinstance(mesh, Mesh):
        raise ValueError(
            "`mesh` must be a jax.sharding.Mesh, whose devices the stages are, got "
            f"{type(mesh).__name__}."
        )
    for argument, name in (("axis_name", axis_name), *(("data_axes", a) for a in data_axes)):
        if name not in mesh.shape:
            raise ValueError(
                f"`{argument}` {name!r} is not an axis of `mesh`, which has "
                f"{', '.join(map(repr, mesh.axis_names))}."
            )
    if axis_name in data_axes or len(set(data_axes)) < len(data_axes):
        raise ValueError(
            f"`data_axes` must be different axes, and not that of the stages, got {data_axes!r}."
        )
    if mesh.shape[axis_name] != schedule.num_stages:
        raise ValueError(
            f"`schedule` {schedule.name!r} has {schedule.num_stages} stages, and `mesh` "
            f"{mesh.shape[axis_name]} along axis {axis_name!r}: they must be as many."
        )
    if batch_memory not in ("device", "host"):
        raise ValueError(f'`batch_memory` must be "device" or "host", got {batch_memory!r}.')
    is_number = isinstance(gradient_scale, numbers.Real) and math.isfinite(gradient_scale)
    if not is_number or not gradient_scale > 0:
        raise ValueError(f"`gradient_scale` must be a number above 0, got {gradient_scale!r}.")


def check_constant(batch: PyTree) -> None:
    """Raise `ValueError` where gradients of a batch are asked for, by what `custom_vjp` says."""
    leaves = zip(leaf_names(batch), jax.tree.leaves(batch), strict=True)
    moving = [n for n, x in leaves if x.perturbed and jnp.issubdtype(x.value.dtype, jnp.inexact)]
    if moving:
        raise ValueError(
            "`batch` must not depend on what is differentiated, of which a pipeline has gradients "
            f"in `stacked` alone, got {', '.join(moving)}."
        )


@jax.custom_jvp
def only_once(stacked: PyTree) -> PyTree:
    """`stacked`, of which gradients are; `ValueError` where these are differentiated once more.

    The gradient of each copy of a tied leaf is the sum over all of them, which derivatives of that
    sum by one copy are not.
    """
    return stacked


@only_once.defjvp
def _again(primals: Any, tangents: Any) -> Any:
    raise ValueError(
        "`loss_fn` of a pipeline must not be differentiated twice where the model has `tied` "
        "leaves: gradients of their copies are summed outside of what is differentiated. Take "
        "second derivatives of the model itself, `model(params, batch)`."
    )


def check_not_mapped(axis_name: str, manual: Collection[str]) -> None:
    """Raise `ValueError` where the axis of the stages is mapped already."""
    if axis_name in manual:
        raise ValueError(
            f"`axis_name` {axis_name!r} is mapped already where the loss function of this "
            "pipeline is called, which maps the stages itself. In a step of js.make_train_step it "
            "stays free if the state's parameters lie as `layout.stack` puts them."
        )
