"""What can be said of a step's transforms only when there is a state."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from ...mesh import AnyMesh, axis_names
from ...precision import loss_scale_of
from .._hyperparams import Numbers
from .._state import TrainState
from ._probe import check_remembered
from ._transforms import check_exchanges, check_transforms
from ._usable import refuse_untrainable
from .update import StepParts


class StateChecks:
    """Checks of the states that a step is given.

    Args:
      parts: of the step.
      mesh: of the step.
      mode: of the step.
      warn: issues each message once.
    """

    def __init__(
        self, parts: StepParts, mesh: AnyMesh, mode: str, warn: Callable[[str], None]
    ) -> None:
        self._parts, self._mesh, self._mode, self._warn = parts, mesh, mode, warn
        self._is_probed = False
        self._numbers: Numbers | None = None

    def transforms(self, state: TrainState) -> None:
        """What could not be seen before there was a state: which transforms chains consist of."""
        self.numbers(state)
        parts = self._parts
        num_replicas = math.prod(self._mesh.shape[name] for name in axis_names(parts.axis_name))
        if not self._is_probed:
            check_exchanges(parts, state, self._mesh)
        check_transforms(state, parts, self._mode, num_replicas)
        computes = None if parts.policy is None else parts.policy.compute
        if computes == "float16" and loss_scale_of(state.opt_state) is None:
            self._warn(
                '`policy` is js.Policy("float16"), and `optimizer` has no loss scale, so that '
                "gradients below 6e-8 become 0: put js.dynamic_loss_scale(...) around `optimizer`, "
                'or use js.Policy("bfloat16"). If the loss function scales its loss by itself, '
                "nothing is wrong."
            )
        if parts.sync is not None and not self._is_probed:
            opt_state, params = state.opt_state[1], state.params
            opt_state, params = map(parts.lookup.dense, (opt_state, params))
            check_remembered(parts.optimizer, opt_state, params, parts.sync, self._warn)
        self._is_probed = True

    def before_first_use(self, state: TrainState) -> None:
        """What is asked once for every program."""
        refuse_untrainable(self._parts.lookup.dense(state.params))
        self.transforms(state)
        if self._parts.sync is not None:
            _check_shards(self._parts.sync.shards(state.opt_state[-1]))

    def numbers(self, state: TrainState) -> Numbers:
        """Where the optimizer keeps hyperparameters that one may set."""
        if self._numbers is None:
            self._numbers = Numbers(state.opt_state)
        return self._numbers


def _check_shards(shards: list[Any]) -> None:
    """Raise `ValueError` for shards of which each replica has the same one.

    Another library's `unreplicate` takes replica 0's, and the rest of the anchor is lost. The first
    elements are compared of what this process holds: a glance, not a proof.

    Args:
      shards: stacked arrays (replicas, rows, lanes), on devices; others are not looked at.

    Communication: device to host, a few elements per replica; none between replicas.
    """
    known = [x for x in shards if isinstance(x, jax.Array) and not isinstance(x, Tracer)]
    parts = [_glance(x) for x in known]
    # Parameters that start as one number have such shards, too.
    telling = any(len(x) > 1 and x.size and np.ptp(x[0]) for x in parts)
    if telling and all(np.all(x == x[:1]) for x in parts):
        raise ValueError(
            "`state`: every replica keeps another part of the anchor and of what goes with it, and "
            "here all have replica 0's: the state was made from one replica's, as "
            "`flax.jax_utils.unreplicate` and `x[0]` give it, and the rest is lost. Save all of "
            "it, by jaxslowmo.checkpoint or stacked as it is; for one copy of the parameters take "
            "`js.consensus`."
        )


_GLANCE = 64


def _glance(x: jax.Array) -> np.ndarray:
    """(replicas here, n) first elements of (replicas, rows, lanes), as this process holds them."""
    parts = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    rows = math.ceil(_GLANCE / max(x.shape[-1], 1))
    found = [np.asarray(parts[start][:, :rows]) for start in sorted(parts)]
    return np.concatenate([part.reshape(len(part), -1) for part in found])
