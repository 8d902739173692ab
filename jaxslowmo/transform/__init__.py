"""Building blocks of transforms that exchange, without the algorithms themselves."""

from ._algorithm import (
    Algorithm,
    Carry,
    Event,
    InnerPeriods,
    InnerState,
    OverlappedExchange,
    UpdateContext,
    rounded_params,
    wrap_algorithm,
)
from ._due import (
    Communicate,
    Every,
    as_schedule,
    every,
    increment,
    instants,
    phase_scope,
    prevent_fusion,
    run_if,
    run_one_of,
    unseen_zero,
)
from ._gradients import (
    Chain,
    ChainReduction,
    GradientSpec,
    GradientTransform,
    OwnReductionState,
    ReducedAxes,
    Reduction,
    WrapperReduction,
    chain,
    checked_optax,
    gradient_parts,
    gradient_transform,
    init,
    over_stages,
    spec_of,
)
from ._inner_state import moment_events, update_moments
from ._optax_states import (
    TypedTransform,
    alternatives_to,
    counters_in,
    gradient_state,
    holds_state,
    is_state_of,
    known_states,
    move_copies,
    moving_states,
    persistent_leaves,
    remembers_parameters,
    shift_copies,
    takes_extra,
    transient_state,
)
from ._parameter_transform import (
    ExchangeState,
    ParameterTransform,
    check_weight,
    checked_rate,
    first_states,
    phase_name,
    replica_types,
    shardings,
    share_of_whole,
    share_of_whole_leaves,
    unless_idle,
)
from ._replica_group import (
    ReplicaGroup,
    check_are_specs,
    check_axis_argument,
    checked_bytes,
    checked_group,
    packing_of,
    split_dimension,
)
from ._stacked import Arrays, StackedReplicas, unreplicate_number, vmap_replicas
