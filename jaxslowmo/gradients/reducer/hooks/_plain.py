"""The hooks that send everything, or nothing."""

from ....collectives import all_mean
from .._hook import CommHook, stateless


def mean() -> CommHook:
    """The plain mean, for wrappers to build on.

    Returns:
      A `CommHook` without state; same result as no hook.

    Communication: one all-reduce of the bucket in its dtype.

    Source: torch 2.13, `default_hooks.allreduce_hook`.
    """
    return stateless(lambda bucket: all_mean(bucket.flat, bucket.axis_name))


def noop() -> CommHook:
    """Gradients stay as they are on each replica; tells what communication costs.

    Returns:
      A `CommHook` without state.

    Communication: none.

    Source: torch 2.13, `debugging_hooks.noop_hook`.
    """
    return stateless(lambda bucket: bucket.flat)
