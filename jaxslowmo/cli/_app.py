"""The commands: each reads and checks its options, then calls the function that does the work."""

import difflib
import importlib
import sys
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from .._version import __version__
from ._errors import CommandError

_ABOUT = "Data-parallel training whose replicas communicate rarely."


class Command(NamedTuple):
    """A command; of its modules nothing is imported before it is called.

    Attributes:
      config: module and class of its configuration, in `config`.
      work: module and function that get the configuration.
      about: what it does.
    """

    config: str
    work: str
    about: str


COMMANDS = {
    "train": Command(
        "_commands.TrainCommand",
        "_start.start",
        "Train a byte-level language model with one algorithm.",
    ),
    "compare": Command(
        "_commands.CompareConfig",
        "_compare.compare",
        "Train with several algorithms at equal steps and seeds: a table and a figure.",
    ),
    "launch": Command(
        "_commands.LaunchConfig",
        "_start.start_all",
        "Train in several processes of this machine: launch --processes 4 -- train --out ...",
    ),
    "sample": Command(
        "_commands.SampleConfig",
        "_sample.sample",
        "Write text from the trained model of a run.",
    ),
    "inspect graph": Command(
        "_inspect.InspectGraphConfig",
        "_inspect_graph.inspect_graph",
        "Show who sends to whom, what it costs, and how fast the nodes agree.",
    ),
    "inspect graphs": Command(
        "_inspect.InspectGraphsConfig",
        "_inspect_graphs.inspect_graphs",
        "Compare graphs at several sizes: tables and a picture.",
    ),
    "inspect config": Command(
        "_commands.InspectConfigConfig",
        "_inspect_config.inspect_config",
        "Show devices and memory of a run of `train` with these options, and what it would send.",
    ),
    "inspect schedule": Command(
        "_inspect.InspectScheduleConfig",
        "_inspect_schedule.inspect_schedule",
        "Draw the schedule of a pipeline, and compare the kinds: bubble, stash, messages.",
    ),
    "tune buckets": Command(
        "_commands.TuneBucketsConfig",
        "_tune_buckets.tune_buckets",
        "Measure bucket limits of the gradient reduction, and print the best: whole training "
        "steps of data parallelism, with loss, gradients, reduction and optimizer.",
    ),
    "tune outer": Command(
        "_commands.TuneOuterConfig",
        "_tune_outer.tune_outer",
        "Try momenta and rates of slow steps with several seeds, and print the best. All settings "
        "and seeds of a period train in one program, with virtual replicas on one device.",
    ),
}
_GROUPS = {name.partition(" ")[0] for name in COMMANDS if " " in name}


def run(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Raises:
      CommandError: the command line is wrong.
      SystemExit: help of a command was asked for.
    """
    words = [*(sys.argv[1:] if argv is None else argv)]
    name = next((x for x in COMMANDS if words[: x.count(" ") + 1] == x.split()), None)
    if name is None:
        _describe(words)
        return 0
    command, words = COMMANDS[name], words[name.count(" ") + 1 :]
    others: list[list[str]] = []
    if name == "launch":  # what follows "--" is the command to start
        end = words.index("--") if "--" in words else len(words)
        words, others = words[:end], [words[end + 1 :]]
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        # Imported here, as the command's modules, since `--help` waits for neither tyro nor jax.
        from ._command_line import configured

        cls = _imported(f".config.{command.config}")
        config = configured(cls, f"jaxslowmo {name}", words, command.about)
        return _imported(f".{command.work}")(config, *others)


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module, __package__), name)


def _describe(words: Sequence[str]) -> None:
    """Print the version, or the commands; raise `CommandError` for words that are no command."""
    group = [word for word in words if word not in ("-h", "--help")]
    if words == ["--version"]:
        print(f"jaxslowmo {__version__}")
        return
    if group and (len(group) > 1 or group[0] not in _GROUPS):
        name = " ".join(group[: 2 if group[0] in _GROUPS else 1])
        nearest = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise CommandError(f"no such command: {name}{hint}; see jaxslowmo --help")
    print(f"usage: {' '.join(['jaxslowmo', *group])} COMMAND [OPTIONS]\n\n{_ABOUT}\n")
    for name, command in COMMANDS.items():
        if name.split()[: len(group)] == group:
            print(f"  {name}\n{textwrap.indent(textwrap.fill(command.about, 72), ' ' * 6)}")
    print("\n`jaxslowmo COMMAND --help` lists its options, `jaxslowmo --version` its version.")


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)
