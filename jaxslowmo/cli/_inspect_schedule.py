"""`jaxslowmo inspect schedule`: one pipeline schedule, its costs, and those of other kinds."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxslowmo.pipeline import schedules
from jaxslowmo.pipeline.schedules import Schedule
from jaxslowmo.reports.time import COLOURS, Piece, grid_lines, schedule_picture, schedule_title

from ._errors import CommandError, file_errors, usage_errors
from ._output import facts_table, numbers_table, say
from .config._inspect import InspectScheduleConfig


def inspect_schedule(config: InspectScheduleConfig) -> int:
    """Print a schedule as a grid, and its costs next to other kinds; return the exit code.

    Raises:
      CommandError: the library refuses the schedule, or the picture cannot be written.
    """
    out = config.out
    with usage_errors(num_stages="stages", rows="table"):
        schedule = config.schedule()
        simulation = schedule.simulate(**config.times, lockstep=config.lockstep)
    if out is not None:
        _draw(schedule, simulation, config, out)
    if config.orders:
        print(*schedule.orders(), sep="\n")
        return 0
    if config.as_json:
        print(json.dumps(_as_json(schedule, config), indent=2))
        return 0
    console = Console()
    facts = {
        f"time, {_how(config)}": f"{simulation.time:.6g}",
        "bubble": _percent(simulation.bubble),
        "stash of each stage, microbatches of a chunk": _row(schedule.stash),
        "messages that each stage sends": _row(schedule.sends),
    }
    console.print(facts_table(facts, title=schedule_title(schedule)))
    for line in grid_lines(schedule, width=console.width, whole=config.whole):
        console.print(_coloured(line), no_wrap=True, crop=False, soft_wrap=True)
    say(console, _legend(schedule), "")
    if config.table is None:
        console.print(_comparison(schedule, config))
    if out is not None:
        say(console, str(out))
    return 0


def others(schedule: Schedule, config: InspectScheduleConfig) -> dict[str, Schedule | str]:
    """Return schedules of the same sizes by name in the table, or the reason why there is none."""
    limit = {"most_stash": config.most_stash} if config.most_stash else {}
    chunks = config.chunks or 1
    # Other kinds have one row, and take only the sizes.
    rows: dict[str, dict[str, dict[str, Any]]] = {
        "interleaved": {"": {"num_chunks": max(chunks, 2)}},
        "zero_bubble": {" (H1)": {}, " (H2)": {"memory": 2}},
        "lockstep": {"": {"num_chunks": chunks, **config.times, **limit}},
    }
    sizes, kinds = (schedule.num_stages, schedule.num_microbatches), {}
    for kind in schedules.KINDS:
        for which, options in rows.get(kind, {"": {}}).items():
            try:
                kinds[kind + which] = schedules.by_name(kind, *sizes, **options)
            except ValueError as error:
                kinds[kind + which] = str(error)
    return kinds


def _comparison(schedule: Schedule, config: InspectScheduleConfig) -> Table:
    def cells(name: str, other: Schedule | str) -> list[str]:
        if isinstance(other, str):
            return [name, *["none"] * 5]
        numbers = _numbers(other, config)
        bubbles = _percent(numbers["bubble"]), _percent(numbers["lockstep_bubble"])
        stash = f"{max(other.stash) / other.num_chunks:g}"
        return [name, str(other.num_chunks), *bubbles, stash, str(max(other.sends))]

    letters = zip("FIW", config.times.values(), strict=False)
    times = ", ".join(f"{letter} {value:g}" for letter, value in letters)
    title = f"Kinds with {times}, send {config.send:g}"
    caption = "stash: most microbatches of a whole stage; sends: messages of the busiest stage"
    names = ("chunks", "bubble", "in lockstep", "stash", "sends")
    rows = (cells(*kind) for kind in others(schedule, config).items())
    return numbers_table("kind", names, rows, title=title, caption=caption)


def _as_json(schedule: Schedule, config: InspectScheduleConfig) -> dict[str, Any]:
    names = ("num_stages", "num_microbatches", "num_chunks", "placement")
    facts: dict[str, Any] = {"kind": schedule.name}
    facts |= {name: getattr(schedule, name) for name in names} | {"times": config.times}
    facts |= _numbers(schedule, config) | {"orders": schedule.orders()}
    if config.table is None:
        facts["kinds"] = {
            name: {"error": other} if isinstance(other, str) else _numbers(other, config)
            for name, other in others(schedule, config).items()
        }
    return facts


def _numbers(schedule: Schedule, config: InspectScheduleConfig) -> dict[str, Any]:
    free = schedule.simulate(**config.times)
    together = schedule.simulate(**config.times, lockstep=True)
    return {
        "time": free.time,
        "bubble": free.bubble,
        "lockstep_time": together.time,
        "lockstep_bubble": together.bubble,
        "num_ticks": len(schedule.ticks()),
        "stash": schedule.stash,
        "sends": schedule.sends,
    }


def _draw(
    schedule: Schedule, simulation: schedules.Simulation, config: InspectScheduleConfig, out: Path
) -> None:
    times = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in config.times.items())
    costs = f"bubble {_percent(simulation.bubble)}, time {simulation.time:.6g}"
    line = f"{_how(config)}; {times}; {costs}"
    try:
        with file_errors("--out", "write", out):
            schedule_picture(simulation, out, title=schedule_title(schedule), lines=[line])
    except ValueError as error:  # matplotlib does not know the format
        raise CommandError(f"--out: cannot write {out}: {error}") from None


def _how(config: InspectScheduleConfig) -> str:
    return "in lockstep" if config.lockstep else "each stage as soon as it can"


def _legend(schedule: Schedule) -> str:
    backward = "I gradient of the input, W of the weights, B both"
    where = "chunk, operation, microbatch" if schedule.num_chunks > 1 else "operation, microbatch"
    return f"{where}: F forward{'' if schedule.forward_only else f', {backward}'}; . idle"


def _coloured(line: list[Piece]) -> Text:
    text = Text()
    for piece in line:
        text.append(piece.text, f"white on {COLOURS[piece.kind]}" if piece.kind else "")
    return text


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _row(counts: tuple[int, ...]) -> str:
    same = len(set(counts)) == 1
    return str(counts[0]) if same else " ".join(map(str, counts))
