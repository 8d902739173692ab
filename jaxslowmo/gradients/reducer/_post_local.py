"""Post-local SGD: averages gradients over all replicas first, later over fewer or none."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..._support.settings import records_settings
from ..._support.types import PyTree
from ...transform import (
    Communicate,
    Every,
    GradientTransform,
    Joined,
    checked_optax,
    gradient_state,
    increment,
    run_if,
    spec_of,
)
from ..sparse import with_equal_entries

_OWNER = "post_local_gradients"


@gradient_state
class PostLocalGradientsState(NamedTuple):
    """State of `post_local_gradients`."""

    count: jax.Array  # () int32, updates so far; equal on all replicas
    before: PyTree  # state of the transform used up to the start
    after: PyTree  # state of the transform used from then on; () without one


@records_settings
def post_local_gradients(
    schedule: Every,
    before: optax.GradientTransformation,
    after: optax.GradientTransformation | None = None,
) -> GradientTransform:
    """Use one gradient transform until a schedule starts, another one or none from then on.

    Use it as the first transform of a chain whose parameter transform has the same schedule:

        late = js.every(8, start=1000)
        js.chain(
            js.post_local_gradients(late, js.all_reduce_gradients("replica")),
            optax.sgd(0.1),
            js.local_sgd("replica", sync_every=late),
        )

    Args:
      schedule: `js.every(k, start=s)`; `before` runs in updates t <= s.
      before: first transform, such as `js.all_reduce_gradients(("node", "device"))`.
      after: later transform, such as `js.all_reduce_gradients("device")`, the mean inside a group;
        None leaves gradients local.

    Returns:
      A transform with state `PostLocalGradientsState`; extra arguments (`weight`) reach both.

    Raises:
      ValueError: `schedule` is no `js.every(...)`, or `before` or `after` is no transform.

    Communication: that of `before` in updates up to the start, that of `after` in later ones.

    Source: Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020 (post-local SGD);
      torch 2.13, `post_localSGD_hook`.
    """
    if not isinstance(schedule, Every):
        raise ValueError(f"{_OWNER}: `schedule` must be js.every(k, start=...), got {schedule!r}.")
    after = optax.identity() if after is None else after
    early, late = checked_optax(_OWNER, "before", before), checked_optax(_OWNER, "after", after)
    spec = _PostLocal.of(spec_of(before), spec_of(after), schedule=schedule)

    def init_fn(params: PyTree) -> PostLocalGradientsState:
        return PostLocalGradientsState(
            jnp.zeros([], jnp.int32), early.init(params), late.init(params)
        )

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        count = increment(state.count)

        def runs(tx: optax.GradientTransformationExtraArgs, field: str):
            def run(operand: tuple[PyTree, PostLocalGradientsState]):
                grads, s = operand
                grads, inner = tx.update(grads, getattr(s, field), params, **extra)
                return grads, s._replace(count=count, **{field: inner})

            return run

        operand = updates, state
        first, second = with_equal_entries([runs(early, "before"), runs(late, "after")], operand)
        return run_if(spec.is_early(state), first, second, operand, axes=spec.axes)

    return GradientTransform(init_fn, update_fn, spec)


@dataclass(frozen=True, kw_only=True, eq=False)
class _PostLocal(Joined):
    """The description of two transforms, of which each update calls one."""

    schedule: Every

    def is_early(self, state: PyTree) -> jax.Array:
        """Return whether the next update calls the first one, () bool."""
        count = increment(state.count)
        return ~(count > min(self.schedule.start, jnp.iinfo(count.dtype).max))

    def states(self, state: PyTree) -> Sequence[PyTree]:
        return state.before, state.after

    def calls(self, state: PyTree) -> Sequence[Communicate]:
        is_early = self.is_early(state)
        return is_early, ~is_early
