"""In what a run computes: the policy of its step, and the loss scale that float16 needs."""

import optax

import jaxslowmo as js

from ..config._train import MOST_LOSS_SCALE, TrainConfig

# Of the model: they multiply statistics that are float32 anyway.
_NORMS = ("norm", "blocks/*/norm_*")


def policy_of(config: TrainConfig) -> js.Policy | None:
    """Return the policy that `--dtype` says; None with stages."""
    # A buffer of stages holds norms beside other weights, which no name tells apart. The layers
    # themselves compute in this dtype: the policy only casts what they would cast.
    return None if "stage" in config.mesh.model_axes else js.Policy(config.dtype, keep=_NORMS)


def scaled(
    optimizer: optax.GradientTransformation, config: TrainConfig
) -> optax.GradientTransformation:
    """The optimizer with the loss scale of the configuration; itself where it has none."""
    if config.dtype != "float16" or not config.loss_scale:
        return optimizer
    return js.dynamic_loss_scale(
        optimizer,
        initial=config.loss_scale,
        growth_interval=config.loss_scale_interval,
        max_scale=MOST_LOSS_SCALE,
    )
