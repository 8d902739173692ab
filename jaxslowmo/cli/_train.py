"""`jaxslowmo train`."""

from pathlib import Path

from rich.console import Console

from ._config import TrainConfig
from ._devices import choose_mesh
from ._errors import usage_errors
from ._output import make_folder
from ._progress import Reporter
from ._run import Job, load_text
from ._tables import run_table
from ._units import format_count

EXIT_CODES = {"finished": 0, "diverged": 1, "interrupted": 130}


def train(config: TrainConfig, out: Path | None) -> int:
    """Trains once, shows the progress and a summary, and returns the exit code.

    Raises:
        CommandError: for arguments that do not go together, or with the data or the devices.
    """
    console = Console()
    with usage_errors():
        text = load_text(config)
        placement = choose_mesh(config)
        job = Job(config, placement, text)
    folder = make_folder(out, "train")
    name = config.algorithm.algorithm
    for line in (
        f"{name}, {format_count(job.num_parameters)} parameters, {placement.description}",
        text.description,
    ):
        console.print(line, highlight=False, soft_wrap=True)
    with Reporter(console, name, config.steps, would=placement.is_virtual) as reporter:
        result = job.run(config.seed, folder, reporter)
    console.print(run_table(result.summary))
    if result.statistics:
        console.print(str(result.statistics), highlight=False, soft_wrap=True, markup=False)
    if result.status == "diverged":
        step = result.summary["steps"]
        console.print(
            f"The loss is not finite at step {step}: lower --learning-rate or lengthen --warmup.",
            highlight=False,
            soft_wrap=True,
        )
    console.print(f"Results in {folder}", highlight=False, soft_wrap=True)
    return EXIT_CODES[result.status]
