"""What a pipeline refuses, before it is traced and when it is."""

import math
import numbers
from collections.abc import Collection, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ..._choices import check_choice
from ..._typing import PyTree
from ...tree import leaf_names
from ..model import LayeredModel
from ..schedules import Schedule

BatchMemory = Literal["device", "host"]


def check_pipeline(model: Any, schedule: Any) -> None:
    """Raise `ValueError` unless these are a `LayeredModel` and a `Schedule`."""
    if not isinstance(model, LayeredModel):
        raise ValueError(
            "`model` must be a js.LayeredModel, of functions of (params, x) and a loss, got "
            f"{type(model).__name__}."
        )
    if not isinstance(schedule, Schedule):
        raise ValueError(
            "`schedule` must be a js.pipeline.Schedule such as js.schedules.one_f_one_b(4, 16), "
            f"got {schedule!r}."
        )


def as_axes(axes: Any) -> tuple[str, ...]:
    """Return the names of `data_axes`, of which one may stand for itself.

    Raises:
      ValueError: something that is neither a name nor a sequence of names.
    """
    names = (axes,) if isinstance(axes, str) else axes
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            "`data_axes` must be the name of an axis of `mesh` or a sequence of names, got "
            f"{axes!r}."
        )
    return tuple(names)


def check_arguments(
    schedule: Schedule,
    mesh: Any,
    axis_name: Any,
    data_axes: tuple[str, ...],
    remat: Any,
    gradient_scale: Any,
    batch_memory: Any,
) -> None:
    """Raise `ValueError` for axes, a memory, a scale or a flag that cannot be."""
    if not isinstance(mesh, Mesh):
        raise ValueError(
            "`mesh` must be a jax.sharding.Mesh, whose devices the stages are, got "
            f"{type(mesh).__name__}."
        )
    if not isinstance(axis_name, str):
        raise ValueError(
            f"`axis_name` must be the name of one axis of `mesh`, that of the stages, got "
            f"{axis_name!r}."
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
    if not isinstance(remat, bool | np.bool_):
        raise ValueError(
            "`remat` must be True or False, whether backward passes compute forward passes again, "
            f"got {remat!r}."
        )
    check_choice("batch_memory", batch_memory, BatchMemory)
    is_number = isinstance(gradient_scale, numbers.Real) and math.isfinite(gradient_scale)
    if not is_number or not gradient_scale > 0:
        raise ValueError(f"`gradient_scale` must be a number above 0, got {gradient_scale!r}.")


def check_key(rng: Any) -> None:
    """Raise `ValueError` for what is no PRNG key of jax."""
    if rng is None:
        return
    dtype, shape = getattr(rng, "dtype", None), jnp.shape(rng) if hasattr(rng, "shape") else None
    is_typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if (is_typed and shape == ()) or (dtype == jnp.uint32 and len(shape or ()) == 1):
        return
    what = repr(rng) if dtype is None else f"an array {dtype}{list(shape or ())}"
    raise ValueError(
        f"`rng` must be one PRNG key such as jax.random.key(0) makes, or None, got {what}."
    )


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
    """Return `stacked`, and raise `ValueError` where its gradients are differentiated once more.

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
