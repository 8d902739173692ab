"""DES-LOC: LocalSGD that averages the moments of the optimizer too, each in its own period."""

from collections.abc import Mapping
from dataclasses import replace

from .._support.checks import ArgumentError, checked_int, records_settings
from .._support.types import AxisName
from ..collectives.codecs import Codec
from ..transform import Every, ParameterTransform, as_schedule
from ._local_sgd import local_sgd


@records_settings
def des_loc(
    axis_name: AxisName,
    *,
    sync_every: int | Every = 32,
    moments: Mapping[str, int] | None = None,
    local_axis_name: AxisName | None = None,
    bucket_bytes: int | None = None,
    codec: Codec | None = None,
) -> ParameterTransform:
    """Average parameters every `sync_every` updates, and the optimizer's moments less often.

    Put it last in a `js.chain`, or give it to `js.make_train_step`: it changes the state of the
    optimizer. With K = `sync_every` and Adam's moments m and v, of the R replicas i:

        params_i <- mean of all params_i       if t % K == 0
        m_i <- mean of all m_i                 if t % (3 K) == 0
        v_i <- mean of all v_i                 if t % (6 K) == 0

    It is `js.local_sgd` with `inner_state` of such periods: averages follow the update (the paper's
    precede it). With sparse gradients use `moments={"mu": 3, "nu": 3}`, or an eps of 1e-4:
    docs/outer.md says why.

    Args:
      axis_name: mapped axis of the replicas.
      sync_every: period K of the parameters, or `js.every(...)`.
      moments: for each field of optax states the number of averages of parameters to one of its
        own, >= 1; None is `{"mu": 3, "nu": 6}`, for Adam.
      local_axis_name: axis of the devices inside a replica, as in `js.local_sgd`.
      bucket_bytes: size at which a buffer is complete, in bytes; see `js.local_sgd`.
      codec: format of the parameters' exchange; moments are sent in their own dtypes.

    Returns:
      A `ParameterTransform`, whose phases name the fields, as in `("average", "mu")`.

    Raises:
      ValueError: numbers in `moments` below 1, and what `js.local_sgd` refuses; in the first update
        a field that is not in the optimizer's state.

    Communication: that of `js.local_sgd`, and in updates in which moments are due one all-reduce of
      their bytes, for each field.

    Source: Iacob et al., "DES-LOC", 2025, arXiv 2505.22549, algorithms 1 and 2.
    """
    schedule, moments = as_schedule(sync_every), {"mu": 3, "nu": 6} if moments is None else moments
    if not isinstance(moments, Mapping):
        raise ArgumentError(
            "moments",
            "des_loc: `moments` must map fields of optax states to numbers of averages, such as "
            f'{{"mu": 3, "nu": 6}}, got {moments!r}.',
        )
    what = "des_loc: `moments` counts averages of parameters and"
    periods = {
        field: replace(schedule, k=schedule.k * checked_int(what, count, 1))
        for field, count in moments.items()
    }
    return local_sgd(
        axis_name,
        sync_every=schedule,
        local_axis_name=local_axis_name,
        bucket_bytes=bucket_bytes,
        codec=codec,
        inner_state=periods,
    )
