"""The start of `train`, alone or under a process that watches it, and of all processes of a run."""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ._command_line import configured
from ._errors import CommandError, usage_errors
from .config._commands import LaunchConfig, TrainCommand
from .processes import _supervise
from .processes._peers import is_one_of_several, known_processes, supervisor

_SET_BY_LAUNCH = (
    "--coordinator", "--coordinator-bind", "--num-processes", "--process-id", "--restarts",
)  # fmt: skip


def train(command: TrainCommand) -> int:
    """Train, or supervise the child that trains if there are several processes."""
    config, out, parent = command.train, command.out, supervisor()
    if parent is None and is_one_of_several(config):
        with usage_errors():  # before any process waits for the others
            config.check_processes(known_processes(config) or 1)
        restarts = config.restarts
        return _supervise.supervise(sys.argv[1:], out or Path(), restarts=restarts)
    if parent is not None:
        _supervise.end_with_parent(parent)
        # The parent passes Ctrl-C on as SIGTERM, which ends all processes. A KeyboardInterrupt in
        # one of them would leave the others waiting.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    from ._train import train as run  # loads jax, which the process that supervises does without

    return run(config, out)


def launch(config: LaunchConfig, words: Sequence[str]) -> int:
    """Start the processes of `train` on this machine.

    Raises:
      CommandError: the words are not "train" and right options of it, or options that launch sets.
    """
    if words[:1] != ["train"]:
        shown = " ".join(words) or "nothing"
        raise CommandError(f"launch runs: jaxslowmo launch ... -- train ...; got {shown}")
    refused = [x for x in _SET_BY_LAUNCH for word in words if word.partition("=")[0] == x]
    if refused:
        raise CommandError(f"{', '.join(refused)} of train: launch decides it")
    # The options of train are checked here once, and not first in every process.
    with usage_errors():
        command = configured(TrainCommand, "jaxslowmo train", words[1:])
        command.train.check_processes(config.processes)
    if command.out is None:
        raise CommandError("train needs --out where there are several processes: they share it")
    return _supervise.launch(
        config.processes, config.restarts, config.heartbeat_timeout, words, command.out
    )
