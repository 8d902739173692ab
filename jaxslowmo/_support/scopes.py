"""Names of the scopes that wrap the library's exchanges, for the code that sets or reads them.

`jax.named_scope` puts them before the names of operations, in profiles and compiled programs.
"""

# Scopes of transforms, each with what it reduces. (Error messages begin with the same names.)
ALL_REDUCE_GRADIENTS = "all_reduce_gradients"
ALL_REDUCE_ROWS = "all_reduce_rows"
SKIP_UNUSED = "skip_unused"
LOSS_SCALE = "loss_scale"  # whether something overflowed
GRADIENT_TRANSFORM = "gradient_transform"  # a transform that the user wrote
TIED = "sum_tied_gradients"  # gradients of parameters that several stages hold
CLIP = "clip_by_global_norm"  # the norm
# Scopes of a train step.
MODEL_STATE = "model_state"
METRICS = "metrics"
# "phase:NAME" wraps the exchange of one event of a parameter transform.
PHASE = "phase:"
EVERY_PHASE = "*"  # as NAME: part of any exchange that is due

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
"""All scopes that wrap the exchanges of the library's transforms."""

# Around the means of an optimizer's moments, whose exchange is one of parameters else.
MOMENTS = "moments"
AGREE = "agree"  # whether all replicas agree
# "padding:3of8" says that of 8 bytes that a collective sends 3 are padding; nested ones multiply.
PADDING = "padding:"

CONTENT = {
    ALL_REDUCE_GRADIENTS: "gradients",
    ALL_REDUCE_ROWS: "gradients",
    GRADIENT_TRANSFORM: "gradients",
    TIED: "gradients",
    CLIP: "norm",
    AGREE: "flags",
    LOSS_SCALE: "flags",
    SKIP_UNUSED: "flags",
    MOMENTS: "moments",
    MODEL_STATE: "statistics",
    METRICS: "metrics",
}
"""Maps a scope to what its collectives send; in the phase of an exchange others send parameters."""

# Not a scope: the name for notes about buffers of gradients; notes for parameters name the phase.
GRADIENTS = "gradients"
