"""Names of the scopes around what the library exchanges, for those who make and who read them.

`jax.named_scope` puts them before the operations inside: profiles and compiled programs hold them.
"""

# Of transforms: what is reduced under them. (Their errors begin with the same names.)
ALL_REDUCE_GRADIENTS = "all_reduce_gradients"
ALL_REDUCE_ROWS = "all_reduce_rows"
SKIP_UNUSED = "skip_unused"
LOSS_SCALE = "loss_scale"  # whether something overflowed
GRADIENT_TRANSFORM = "gradient_transform"  # one of the user's own
TIED = "sum_tied_gradients"  # of parameters that several stages hold
CLIP = "clip_by_global_norm"  # the norm
# Of a train step.
MODEL_STATE = "model_state"
METRICS = "metrics"
# "phase:NAME", around the exchange of one event of a parameter transform.
PHASE = "phase:"
EVERY_PHASE = "*"  # as NAME: part of whichever exchange is due

OF_TRANSFORMS = (
    ALL_REDUCE_GRADIENTS,
    ALL_REDUCE_ROWS,
    CLIP,
    GRADIENT_TRANSFORM,
    LOSS_SCALE,
    PHASE,
    SKIP_UNUSED,
    TIED,
)
"""All scopes around what transforms of the library exchange."""

# Not a scope: buffers of gradients are noted under this name, those of parameters under a phase's.
GRADIENTS = "gradients"
