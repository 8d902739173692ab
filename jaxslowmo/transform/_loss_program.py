"""`LossProgram`, which says what a step asks of a loss function that is more than a function."""

from collections.abc import Callable
from typing import Any

import optax

from .._support.types import PyTree


class LossProgram:
    """Base class of loss functions with parameters, programs or optimizers in a form of their own.

    A step asks instances of this class alone: a user's loss function may have attributes of the
    same names.

    Attributes:
      param_specs: a `PartitionSpec` for each leaf of the parameters, over axes inside a replica;
        None: they are whole there.
      param_types: types of the parameters in the form in which a step keeps them; None: those of
        the trees that `init` is given.
      dispatch: function that runs the programs of the loss before those of the step, which take its
        results in place of the batch (see `HostPipeline.dispatch`); None: it has no programs.
    """

    param_specs: PyTree | None = None
    param_types: PyTree | None = None
    dispatch: Callable[..., Any] | None = None

    @staticmethod
    def of(loss_fn: Any) -> "LossProgram":
        """Return `loss_fn` if it is a `LossProgram`, and the base class' defaults if it is not."""
        return loss_fn if isinstance(loss_fn, LossProgram) else LossProgram()

    def before_run(self) -> None:
        """Raise an error if compiled programs are out of date; called before each one runs."""

    def params_form(self, params: PyTree) -> PyTree:
        """Return the parameters that `init` is given in the form that the loss function takes."""
        return params

    def model_state_form(self, model_state: PyTree) -> PyTree:
        """Return the model state that `init` is given in the form that the loss function takes."""
        return model_state

    def check_mesh(self, mesh: Any) -> None:
        """Raise `ValueError` if the step's `mesh` cannot run the programs of `dispatch`."""

    def tied_transform(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """Return `tx` for the parameters, of which tied leaves are one parameter."""
        return tx
