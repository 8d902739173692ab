"""A run that goes on on another mesh: how its parameters were, and how they shall be."""

from collections.abc import Mapping
from typing import Any

from jaxslowmo.checkpoint import SavedForm
from jaxslowmo.models import gpt_types

from ..config._cluster import ClusterConfig
from ..config._fields import options_of
from ..config._train import TrainConfig, train_config
from ._alike import saved_values
from ._model import Form, form_of


def config_then(extra: Mapping[str, Any]) -> TrainConfig:
    """What a saved state follows from; where its processes were does not matter for that."""
    unused = {*options_of(ClusterConfig), "resume", "overwrite"}
    values = saved_values(extra["config"])
    return train_config({name: value for name, value in values.items() if name not in unused})


def saved_form(extra: Mapping[str, Any], now: Form) -> SavedForm | None:
    """The form of the parameters of a checkpoint; None where it has the names of now.

    Args:
      extra: what was saved beside the state.
      now: the form that they shall have.
    """
    then = form_of(config_then(extra))
    # In stages parameters have the names of layers, without them those of flax's modules. From
    # stages to others the checkpoint knows the way.
    if (then.layout is None) == (now.layout is None):
        return None
    types = then.stack(gpt_types(then.config))
    return SavedForm(types, lambda tree: now.stack(then.unstack(tree)))
