"""Errors that report failures of other processes."""

from collections.abc import Mapping


class TPUWorkerError(RuntimeError):
    """The device process of a `TPUManager` failed, ended, or did not answer in time.

    Attributes:
      worker_traceback: the traceback of the process or thread that failed, None without one
        (killed, aborted, no answer).
      exitcode: exit code of the device process, negative for a signal, None while it runs.
    """

    def __init__(
        self, message: str, *, worker_traceback: str | None = None, exitcode: int | None = None
    ):
        text = message if worker_traceback is None else f"{message}\n\n{worker_traceback.rstrip()}"
        super().__init__(text)
        self.worker_traceback = worker_traceback
        self.exitcode = exitcode


def not_installed(
    package: str, extra: str = "torch", user: str = "torch_compat"
) -> ModuleNotFoundError:
    """Return the error for a missing package.

    Args:
      package: name of the package.
      extra: the extra of jaxslowmo that installs it.
      user: what needs it.
    """
    return ModuleNotFoundError(
        f"{user} needs {package}, which is not installed; the extra `{extra}` has it: "
        f"pip install 'jaxslowmo[{extra}]' (in a checkout: '.[{extra}]')",
        name=package,
    )


def describe(error: BaseException) -> str:
    """Return `repr(error)`, or the name of its type if `repr` fails."""
    try:
        return repr(error)
    except Exception:
        return type(error).__name__


class PeerLostError(RuntimeError):
    """Another process has ended, or did not come to an exchange; the message names it."""


class UnlikeCallsError(RuntimeError):
    """Processes are in different exchanges; the message names each process' exchange.

    Exchanges that have begun cannot be undone: to continue, make a new process group.
    """


def unlike_calls(calls: Mapping[int, str]) -> str:
    """Return the sentence that explains why processes cannot continue.

    Args:
      calls: maps a rank to a description of the process' exchange.
    """
    processes: dict[str, list[int]] = {}
    for rank in sorted(calls):
        processes.setdefault(calls[rank], []).append(rank)
    parts = [
        f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} came to {call}"
        for call, ranks in processes.items()
    ]
    return (
        f"Processes must make the same calls in the same order, but {' and '.join(parts)}: not all "
        "run the same forward passes in training mode, backward passes, perform_slowmo() or "
        "consolidated_state_dict(), or arguments of the wrapper differ."
    )


def last_exchanges(lost: Mapping[int, str], own: str) -> str:
    """Return a sentence with the last exchange of lost processes and that of this one.

    Args:
      lost: maps the rank of a process that is lost to the last exchange known of it, "" for none.
      own: the exchange in which this process waits.
    """
    calls = [f"that of process {rank} was {call}" for rank, call in lost.items() if call]
    return f" Its last exchange: {', '.join(calls)}; this process is in {own}." if calls else ""
