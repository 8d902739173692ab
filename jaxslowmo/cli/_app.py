"""The commands: each reads and checks its options, then calls the function that does the work."""

import difflib
import os
import shlex
import sys
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from .._support.extras import missing_extra
from .._version import __version__
from ._errors import FAILED, INTERRUPTED, USAGE_ERROR, CommandError, code_of, describe

COMMANDS = {
    "train": "Train a byte-level language model with one algorithm.",
    "compare": "Train with several algorithms at equal steps and seeds: a table and a figure.",
    "launch": "Train in several processes of this machine: launch --processes 4 -- train --out ...",
    "sample": "Write text from the trained model of a run.",
    "islands status": "Show who takes part in a run of islands: rounds, bytes, and when they last "
    "wrote.",
}


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
            code = run([*(sys.argv[1:] if argv is None else argv)])
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # of `| head`; what is not written yet would fail again at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = FAILED
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        is_module = isinstance(error, ModuleNotFoundError)
        missing = missing_extra("the command line", error) if is_module else None
        code = USAGE_ERROR if missing else code_of(error)
        if not missing and not isinstance(error, CommandError) and code == FAILED:
            raise
        print(f"error: {missing or describe(error)}", file=sys.stderr)
    sys.exit(code)


def run(words: list[str]) -> int:
    """Run a command and return its exit code.

    Raises:
      CommandError: the command line is wrong.
      SystemExit: help of a command was asked for.
    """
    name = next((x for x in COMMANDS if words[: x.count(" ") + 1] == x.split()), None)
    if name is None:
        _describe(words)
        return 0
    own, program = words[name.count(" ") + 1 :], f"jaxslowmo {name}"
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        # Imported here, as what does the work, since `--help` waits for neither tyro nor jax.
        from . import _config
        from ._config import argument_errors, parse_config, read_config, warn_unused

        if name == "train":
            from ._supervise import train_command

            return train_command(read_config(_config.TrainConfig, program, own), words)
        if name == "launch":  # what follows "--" is the command to start
            from ._supervise import launch_command

            if "--" not in own and "train" in own:
                at = own.index("train")
                right = shlex.join([*words[:1], *own[:at], "--", *own[at:]])
                raise CommandError(f"launch: -- is missing before train: jaxslowmo {right}")
            end = own.index("--") if "--" in own else len(own)
            return launch_command(
                parse_config(_config.LaunchConfig, program, own[:end]), own[end + 1 :]
            )
        if name == "compare":
            config = read_config(_config.CompareConfig, program, own)
            warn_unused(config, own)
            from ._compare import compare

            return compare(config)
        if name == "sample":
            config = parse_config(_config.SampleConfig, program, own)
            warn_unused(config, own)
            from ._sample import sample

            return sample(config)
        url = parse_config(_config.StatusConfig, program, own).url
        import jaxslowmo as js

        from ._errors import island_errors

        with island_errors(), argument_errors():
            print(js.islands.status(url))
    return 0


def _describe(words: Sequence[str]) -> None:
    """Print the version, or the commands; raise `CommandError` for words that are no command."""
    group = [word for word in words if word not in ("-h", "--help")]
    if words == ["--version"]:
        print(f"jaxslowmo {__version__}")
        return
    if group and group != ["islands"]:
        name = " ".join(group[: 2 if group[0] == "islands" else 1])
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
