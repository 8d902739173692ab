"""A wrapper that skips exchanges while a replica's parameters hold NaN or infinity."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from .._support.checks import records_settings
from .._support.scopes import EVERY_PHASE
from .._support.types import PyTree
from ..transform import (
    Algorithm,
    Carry,
    Event,
    ParameterTransform,
    ReplicaGroup,
    UpdateContext,
    phase_scope,
    rounded_params,
    run_if,
    wrap_algorithm,
)
from ..tree import all_finite


@records_settings
def only_finite(inner: ParameterTransform) -> ParameterTransform:
    """Skip an exchange if any replica's parameters are NaN or infinite, and count the skipped ones.

    One replica that diverges would make all others NaN with the next average. This wrapper skips
    the exchange instead, so that the others stay finite, and `state.local["refused"]` counts the
    skipped exchanges. If it is above 0, stop or go back to a checkpoint. Training can go on, but
    nothing is exchanged until the replica recovers. Model state that `js.make_train_step` averages
    with the parameters (`model_state="sync_mean"`) must be finite too, and is skipped with them
    (`"broadcast"` is not part of the exchange and is not checked).

    With y = params + updates, all replicas check together whether y is finite everywhere, before
    each event of `inner` that is due: an average, a slow step, and with a `delay` also what takes
    and sends for it. Each refusal counts. An idle replica's updates (weight 0) are not looked at.
    As the `base` of an exact `js.slowmo` it also checks before the slow step, and may skip it.

    Args:
      inner: the transform that exchanges: `js.local_sgd`, `js.sgp`, `js.slowmo`, `js.diloco`, ...
        Its axes are those over which replicas check.

    Returns:
      A `js.ParameterTransform` that replaces `inner`, also as a `base`. Its phases name no round of
      gossip: the next round depends on the skipped exchanges, so programs read it from the state.

    Raises:
      ValueError: `inner` is no `js.ParameterTransform`.

    Communication: that of `inner`, and before each of its exchanges one all-reduce of 4 bytes over
      all of its axes (of the largest group in `js.hierarchical_local_sgd`). This all-reduce waits
      for the gradients, so `js.sgp(overlap=1)` no longer overlaps.
    """
    if not isinstance(inner, ParameterTransform):
        raise ValueError(
            f"only_finite: `inner` must be a js.ParameterTransform such as js.local_sgd(...), got "
            f"{type(inner).__name__}."
        )
    return ParameterTransform(_only_finite(inner.algorithm))


def _only_finite(inner: Algorithm) -> Algorithm:
    """Return the algorithm, each of whose exchanges all replicas permit first."""
    base = wrap_algorithm(inner)

    def local(params: PyTree) -> dict[str, Any]:
        # All replicas count the same, since all receive the same answer.
        return {"refused": jnp.zeros([], jnp.int32), **base.local(params)}

    def add_check(event: Event) -> Event:
        def run(carry: Carry, replicas: ReplicaGroup, context: UpdateContext) -> Carry:
            with phase_scope(event.name if event.forms is None else EVERY_PHASE):
                allowed, local = permit(carry, replace(replicas, axis_name=inner.axes))
            before = carry.before

            def exchange(carry: Carry) -> Carry:
                carry = event.run(carry._replace(before=before), replicas, context)
                return carry._replace(before=())

            def refuse(carry: Carry) -> Carry:
                missed = event.missed
                return carry._replace(local=missed(carry.local, True)) if missed else carry

            # The answer is the same on all replicas, so it may decide about an exchange. What no
            # event changes passes through no conditional.
            carry = carry._replace(before=(), local=local)
            carry = run_if(allowed, exchange, refuse, carry, axes=inner.bound_axes)
            return carry._replace(before=before)

        # How many exchanges took place is known in the state alone, so phases name no form.
        return replace(event, run=run, forms=None, is_unconditional=False)

    return replace(
        base,
        events=tuple(map(add_check, base.events)),
        local=local,
        owner="only_finite",
        permit=permit,
        bind=inner.bind and (lambda sizes, params: _only_finite(inner.bound(sizes, params))),
        count=None,
    )


def permit(carry: Carry, replicas: ReplicaGroup) -> tuple[jax.Array, Any]:
    """Return whether parameters and statistics are finite on all replicas, and the local state.

    Communication: one all-reduce of 4 bytes.
    """
    # Replicas agree on a flag and not on values, so that no NaN is sent.
    allowed = replicas.agree(all_finite((rounded_params(carry), carry.statistics)))
    refused = carry.local["refused"] + (~allowed).astype(jnp.int32)
    return allowed, carry.local | {"refused": refused}
