"""`jaxslowmo inspect schedule`: one pipeline schedule, its costs, and those of other kinds."""

import json
from pathlib import Path
from typing import Any

from matplotlib.patches import Patch
from rich.console import Console

from jaxslowmo.pipeline import schedules
from jaxslowmo.pipeline.schedules import Schedule, Simulation

from ._errors import CommandError, file_errors, usage_errors
from ._figures import COLOURS, INK, new_figure, save_figure
from ._output import facts_table, say, table_of
from .config._inspect import InspectScheduleConfig


def inspect_schedule(config: InspectScheduleConfig) -> int:
    """Print the costs of a schedule next to those of other kinds; return the exit code.

    Raises:
      CommandError: the library refuses the schedule, or the picture cannot be written.
    """
    out, console = config.out, Console()
    with usage_errors(num_stages="stages", rows="table"):
        schedule = config.schedule()
        simulation = schedule.simulate(**config.times, lockstep=config.lockstep)
    how = "in lockstep" if config.lockstep else "each stage as soon as it can"
    bubble, time = f"{100 * simulation.bubble:.1f} %", f"{simulation.time:.6g}"
    chunks = f", {schedule.num_chunks} chunks" if schedule.num_chunks > 1 else ""
    sizes = f"{schedule.num_stages} stages, {schedule.num_microbatches} microbatches{chunks}"
    title = f"{schedule.name}: {sizes}"
    if out is not None:
        times = (f"{name.replace('_', ' ')} {value:g}" for name, value in config.times.items())
        line = f"{how}; {', '.join(times)}; bubble {bubble}, time {time}"
        try:
            with file_errors("--out", "write", out):
                _draw(simulation, out, title, line)
        except ValueError as error:  # matplotlib does not know the format
            raise CommandError(f"--out: cannot write {out}: {error}") from None
    if config.orders:
        print(*schedule.orders(), sep="\n")
        return 0
    kinds = {} if config.table is not None else _kinds(schedule, config)
    if config.as_json:
        names = ("num_stages", "num_microbatches", "placement")
        all_facts = {"kind": schedule.name, "times": config.times}
        all_facts |= {name: getattr(schedule, name) for name in names}
        all_facts |= _numbers(schedule, config) | {"orders": schedule.orders()}
        print(json.dumps(all_facts | ({"kinds": kinds} if kinds else {}), indent=2))
        return 0
    facts = {
        f"time, {how}": time,
        "bubble": bubble,
        "stash of each stage, microbatches of a chunk": _row(schedule.stash),
        "messages that each stage sends": _row(schedule.sends),
    }
    console.print(facts_table(facts, title=title))
    if kinds:
        letters = zip("FIW", config.times.values(), strict=False)
        times = ", ".join(f"{letter} {value:g}" for letter, value in letters)
        title = f"Kinds with {times}, send {config.send:g}"
        caption = "stash: most microbatches of a whole stage; sends: messages of the busiest stage"
        rows = ({"kind": name, **_cells(costs)} for name, costs in kinds.items())
        console.print(table_of(rows, title=title, caption=caption))
    if out is not None:
        say(console, str(out))
    return 0


def _kinds(schedule: Schedule, config: InspectScheduleConfig) -> dict[str, dict[str, Any]]:
    """Return the costs by name in the table, or an `error`, of schedules of the same sizes."""
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
                kinds[kind + which] = _numbers(schedules.by_name(kind, *sizes, **options), config)
            except ValueError as error:
                kinds[kind + which] = {"error": str(error)}
    return kinds


def _cells(costs: dict[str, Any]) -> dict[str, str]:
    if "error" in costs:
        return dict.fromkeys(("chunks", "bubble", "in lockstep", "stash", "sends"), "none")
    return {
        "chunks": str(costs["num_chunks"]),
        "bubble": f"{100 * costs['bubble']:.1f} %",
        "in lockstep": f"{100 * costs['lockstep_bubble']:.1f} %",
        "stash": f"{max(costs['stash']) / costs['num_chunks']:g}",
        "sends": str(max(costs["sends"])),
    }


def _numbers(schedule: Schedule, config: InspectScheduleConfig) -> dict[str, Any]:
    free = schedule.simulate(**config.times)
    together = schedule.simulate(**config.times, lockstep=True)
    return {
        "num_chunks": schedule.num_chunks,
        "time": free.time,
        "bubble": free.bubble,
        "lockstep_time": together.time,
        "lockstep_bubble": together.bubble,
        "num_ticks": len(schedule.ticks()),
        "stash": schedule.stash,
        "sends": schedule.sends,
    }


def _row(counts: tuple[int, ...]) -> str:
    return " ".join(map(str, counts if len(set(counts)) > 1 else counts[:1]))


_LOOKS = {
    "F": ("blue", "forward"), "I": ("green", "gradient of the input"),
    "W": ("orange", "gradient of the weights"), "B": ("vermilion", "both gradients"),
}  # fmt: skip
_MOST_DIGITS = 14.0 / 0.06  # of microbatch numbers that fit into the whole width


def _draw(simulation: Simulation, path: Path, title: str, line: str) -> None:
    """Draw a simulated step to scale: a bar for each operation, lighter after the first chunk.

    Bars that are wide enough hold the number of their microbatch.
    """
    stages = len(simulation.timeline)
    figure = new_figure((14.0, 0.42 * stages + 1.9), title, line)
    axes = figure.subplots()
    all_timed = [timed for of_stage in simulation.timeline for timed in of_stage]
    chunks = 1 + max(operation.chunk for operation, _, _ in all_timed)
    for operation, start, end in all_timed:
        alpha = 1 - 0.55 * operation.chunk / max(chunks - 1, 1)
        axes.barh(
            operation.stage, end - start, left=start, height=0.86, alpha=alpha, edgecolor="white",
            color=COLOURS[_LOOKS[operation.letter][0]], linewidth=0.5,
        )  # fmt: skip
        number, middle = str(operation.microbatch), (start + end) / 2
        if (end - start) / simulation.time * _MOST_DIGITS >= len(number):
            look = {"size": 6.5, "color": "white" if alpha > 0.6 else INK}
            axes.text(middle, operation.stage, number, ha="center", va="center", **look)
    axes.set(xlim=(0, simulation.time), ylim=(stages - 0.5, -0.5), xlabel="time")
    axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
    axes.spines[["top", "right", "left"]].set_visible(False)
    used = {operation.letter for operation, _, _ in all_timed}
    looks = [(letter, *look) for letter, look in _LOOKS.items() if letter in used]
    patches = [Patch(color=COLOURS[name], label=f"{k}: {text}") for k, name, text in looks]
    figure.legend(handles=patches, loc="outside lower left", ncols=4, frameon=False)
    save_figure(figure, path)
