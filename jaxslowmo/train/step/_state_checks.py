"""What can be said of a step's transforms only when there is a state."""

import math
from collections.abc import Callable

from ...mesh import AnyMesh, axis_names
from ...precision import loss_scale_of
from .._hyperparams import Numbers
from .._state import TrainState
from ._probe import check_remembered
from ._transforms import check_shards, check_transforms
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
        check_transforms(
            state.opt_state,
            mode=self._mode,
            axis_name=parts.axis_name,
            num_replicas=math.prod(self._mesh.shape[name] for name in axis_names(parts.axis_name)),
            exchanges=parts.apart or parts.sync is not None or parts.gradients is not None,
            has_tables=parts.tables is not None,
            validate=parts.validate,
        )
        computes = None if parts.policy is None else parts.policy.compute
        if computes == "float16" and loss_scale_of(state.opt_state) is None:
            self._warn(
                '`policy` is js.Policy("float16"), and `optimizer` has no loss scale, so that '
                "gradients below 6e-8 become 0: put js.dynamic_loss_scale(...) around `optimizer`, "
                'or use js.Policy("bfloat16"). If the loss function scales its loss by itself, '
                "nothing is wrong."
            )
        if parts.sync is not None and not self._is_probed:
            self._is_probed = True
            opt_state, params = state.opt_state[1], state.params
            if parts.tables is not None:
                opt_state, params = opt_state.dense, params.dense
            check_remembered(parts.optimizer, opt_state, params, parts.sync, self._warn)

    def before_first_use(self, state: TrainState) -> None:
        """What is asked once for every program."""
        refuse_untrainable(state.params)
        self.transforms(state)
        if self._parts.sync is not None:
            check_shards(self._parts.sync.shards(state.opt_state[-1]))

    def numbers(self, state: TrainState) -> Numbers:
        """Where the optimizer keeps hyperparameters that one may set."""
        if self._numbers is None:
            self._numbers = Numbers(state.opt_state)
        return self._numbers
