"""The start of `train`, alone or under a process that watches it, and of all processes of a run."""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ._command_line import configured
from ._errors import CommandError, usage_errors
from .config._commands import LaunchConfig, TrainCommand
from .processes import _launch
from .processes._address import refuse_taken_port
from .processes._peers import is_child, is_one_of_several, known_processes, started_by
from .processes._supervise import end_with_parent, supervise


def train(command: TrainCommand) -> int:
    """Train, or supervise the child that trains if there are several processes."""
    if (parent := started_by()) is not None:
        end_with_parent(parent)
    if is_child():
        # The parent passes Ctrl-C on as SIGTERM, which ends all processes. A KeyboardInterrupt in
        # one of them would leave the others waiting.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    config, out = command.train, command.out
    if is_one_of_several(config.cluster) and not is_child():
        with usage_errors():  # before any process waits for the others
            config.mesh.check_processes(known_processes(config.cluster) or 1)
        refuse_taken_port(config.cluster)
        return supervise(sys.argv[1:], out or Path(), restarts=config.cluster.restarts)
    from ._train import train as run  # loads jax, which the process that supervises does without

    return run(config, out)


def launch(config: LaunchConfig, words: Sequence[str]) -> int:
    """Start the processes of `train` on this machine.

    Raises:
      CommandError: the words are not "train" and right options of it.
    """
    _launch.check_launched(config.processes, words)
    # The options of train are checked here once, and not first in every process.
    with usage_errors():
        command = configured(TrainCommand, "jaxslowmo train", words[1:])
        command.train.mesh.check_processes(config.processes)
    if command.out is None:
        raise CommandError("train needs --out where there are several processes: they share it")
    return _launch.launch(
        config.processes, config.restarts, config.heartbeat_timeout, words, command.out
    )
