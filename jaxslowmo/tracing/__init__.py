"""Facts from traced programs: gradients of a loss, and what a transform sends."""

from ._losses import (
    FullLoss,
    LossProgram,
    Quotient,
    as_full_loss,
    as_quotient,
    check_all_used,
    check_loss,
    ready_order,
    unused_parameters,
    warn_of_weight,
)
from ._programs import (
    CALLS,
    Atom,
    InlinedProgram,
    UpdateFacts,
    collective_axes,
    constants_in,
    equations_in,
    has_side_effects,
    interpret,
    loss_arguments,
    read_update,
    run,
    scan_operands,
    state_types,
    trace_inline,
)
