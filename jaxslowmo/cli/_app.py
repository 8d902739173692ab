"""The commands: each reads and checks its options, then calls the function that does the work."""

import difflib
import importlib
import os
import sys
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from .._support.extras import missing_extra
from .._version import __version__
from ._errors import FAILED, INTERRUPTED, CommandError, code_of, describe, usage_errors

COMMANDS = {
    "train": "Train a byte-level language model with one algorithm.",
    "compare": "Train with several algorithms at equal steps and seeds: a table and a figure.",
    "launch": "Train in several processes of this machine: launch --processes 4 -- train --out ...",
    "sample": "Write text from the trained model of a run.",
    "islands status": "Show who takes part in a run of islands: rounds, bytes, and when they last "
    "wrote.",
    "inspect graph": "Show who sends to whom, what it costs, and how fast the nodes agree.",
    "inspect graphs": "Compare graphs at several sizes: tables and a picture.",
    "inspect config": "Show devices and memory of a run of `train` with these options, and what it "
    "would send.",
    "inspect schedule": "Show the costs of a pipeline's schedule, and compare the kinds: bubble, "
    "stash, messages.",
    "tune buckets": "Measure bucket limits of the gradient reduction, and print the best. It times "
    "whole training steps of data parallelism: loss, gradients, reduction, optimizer.",
    "tune outer": "Try momenta and rates of slow steps with several seeds, and print the best. All "
    "seeds of a setting train in one program, with virtual replicas on one device.",
}
_GROUPS = {name.partition(" ")[0] for name in COMMANDS if " " in name}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Args:
      argv: arguments without the name of the program; None: those of the process.

    Raises:
      SystemExit: always. 0: done; 1: the training diverged; 2: wrong usage or a missing extra;
        75: a disk or file server that may recover (both with one line on stderr); 130: interrupted.
    """
    try:
        try:
            code = run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # of `| head`; what is not written yet would fail again at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = FAILED
    except ModuleNotFoundError as error:
        missing = missing_extra("the command line", error)
        if missing is None:
            raise
        code = _complain(CommandError(missing))
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        if not isinstance(error, CommandError) and code_of(error) == FAILED:
            raise
        code = _complain(error)
    sys.exit(code)


def _complain(error: Exception) -> int:
    line = str(error) if isinstance(error, CommandError) else describe(error)
    print(f"error: {line}", file=sys.stderr)
    return code_of(error)


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
    words = words[name.count(" ") + 1 :]
    others: list[list[str]] = []
    if name == "launch":  # what follows "--" is the command to start
        end = words.index("--") if "--" in words else len(words)
        words, others = words[:end], [words[end + 1 :]]
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        # Imported here, as what does the work, since `--help` waits for neither tyro nor jax.
        from ._command_line import configured
        from .config._commands import CONFIGS

        with usage_errors():
            config = configured(CONFIGS[name], f"jaxslowmo {name}", words, COMMANDS[name])
        function = name.replace(" ", "_")
        is_start = name in ("train", "launch")
        module = importlib.import_module("._start" if is_start else f"._{function}", __package__)
        return getattr(module, function)(config, *others)


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
    print(f"usage: {' '.join(['jaxslowmo', *group])} COMMAND [OPTIONS]\n")
    print("Data-parallel training whose replicas communicate rarely.\n")
    for name, about in COMMANDS.items():
        if name.split()[: len(group)] == group:
            print(f"  {name}\n{textwrap.indent(textwrap.fill(about, 72), ' ' * 6)}")
    print("\n`jaxslowmo COMMAND --help` lists its options, `jaxslowmo --version` its version.")


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)
