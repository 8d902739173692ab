"""What goes wrong in another process, told in this one."""

from collections.abc import Mapping


class TPUWorkerError(RuntimeError):
    """The device process of a `TPUManager` failed, ended, or did not answer in time.

    Attributes:
      worker_traceback: the traceback of the process or thread that failed, None where it left
        none (killed, aborted, no answer).
      exitcode: exit code of the device process, negative for a signal, None while it lives.
    """

    def __init__(
        self, message: str, *, worker_traceback: str | None = None, exitcode: int | None = None
    ):
        text = message if worker_traceback is None else f"{message}\n\n{worker_traceback.rstrip()}"
        super().__init__(text)
        self.worker_traceback = worker_traceback
        self.exitcode = exitcode


def not_installed(package: str) -> ModuleNotFoundError:
    """That a package is missing which the extra `torch` has."""
    return ModuleNotFoundError(
        f"torch_compat needs {package}, which is not installed; the extra `torch` has it: "
        "pip install 'jaxslowmo[torch]' (in a checkout: '.[torch]')",
        name=package,
    )


def describe(error: BaseException) -> str:
    """`repr(error)`, or the name of its type where its own representation fails."""
    try:
        return repr(error)
    except Exception:
        return type(error).__name__


class PeerLostError(RuntimeError):
    """Another process has ended, or did not come to an exchange; the message names it."""


class UnlikeCallsError(RuntimeError):
    """Processes have come to different exchanges; the message says which process to which.

    What has begun cannot be taken back: to go on, make the process group anew.
    """


def unlike_calls(calls: Mapping[int, str]) -> str:
    """Return the sentence that explains why processes cannot go on.

    Args:
      calls: the exchange to which each process has come, by rank.
    """
    processes: dict[str, list[int]] = {}
    for rank in sorted(calls):
        processes.setdefault(calls[rank], []).append(rank)
    parts = [
        f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} came to {call}"
        for call, ranks in processes.items()
    ]
    return (
        f"Processes must make the same calls in the same order, but {' and '.join(parts)}; look "
        "for a forward pass in training mode, a backward pass, perform_slowmo() or "
        "consolidated_state_dict() that not all of them run, and for arguments of the wrapper that "
        "differ (in eval() mode forward passes exchange nothing)."
    )
