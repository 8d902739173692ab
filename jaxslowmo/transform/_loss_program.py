"""`LossProgram`, which says what a step asks of a loss function that is more than a function."""

from collections.abc import Callable
from typing import Any

import optax

from .._support.types import PyTree


class LossProgram:
    """Base class of loss functions with parameters, programs or optimizers in a form of their own.

    This is all that a step asks of such a function, whose call is that of any loss function. It
    asks instances of this class alone: a user's function may have attributes of the same names.

    Attributes:
      param_types: types of the parameters in the form in which a step keeps them; None: those of
        the trees that `init` is given.
      dispatch: function that runs the programs of the loss before those of the step, and returns
        what the loss function takes in place of the batch (see `HostPipeline.dispatch`); None: the
        loss function is a part of the step's programs.
      quotient_loss: the loss function as a step calls it, whose loss may be a `tracing.Quotient`
        where that of the call itself is a scalar; None: a step calls the function itself.
      before_run: function that is called before each run of a program, and raises an error if
        compiled programs are out of date; None: they never are.
      check_compiled: function that is given the text of each compiled program before its first run,
        and raises an error if it would not end; None: there is nothing to check.
    """

    param_types: PyTree | None = None
    dispatch: Callable[..., Any] | None = None
    quotient_loss: Callable[..., Any] | None = None
    before_run: Callable[..., None] | None = None
    check_compiled: Callable[[str], None] | None = None

    @staticmethod
    def from_loss_fn(loss_fn: Any) -> "LossProgram":
        """Return `loss_fn` if it is a `LossProgram`, and the base class' defaults if it is not."""
        return loss_fn if isinstance(loss_fn, LossProgram) else LossProgram()

    def check_mesh(self, mesh: Any) -> None:
        """Raise `ValueError` if the programs of `dispatch` cannot run on the step's `mesh`."""

    def params_form(self, params: PyTree) -> PyTree:
        """Return the parameters that `init` is given in the form that the loss function takes."""
        return params

    def model_state_form(self, model_state: PyTree) -> PyTree:
        """Return the model state that `init` is given in the form that the loss function takes."""
        return model_state

    def tied_transform(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """Return `tx` for the parameters, of which tied leaves are one parameter."""
        return tx
