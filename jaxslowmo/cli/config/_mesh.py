"""Options for the mesh axes of the devices, and for the pipeline along the axis "stage"."""

import dataclasses
from typing import Annotated

from ._options import Called, Count, OneOf, Options

# From slow links to fast ones: devices that are neighbours along the last axis are the closest.
AXES = ("replica", "device", "stage", "fsdp", "tensor")
# The axes over which a model is split; the axis "device" splits only the batch.
MODEL_AXES = ("stage", "fsdp", "tensor")
# Copies of the library's lists, because importing those loads jax; a test compares them.
PIPELINES = ("gpipe", "one_f_one_b", "interleaved", "zero_bubble", "zbv", "lockstep")
EXECUTORS = ("one_program", "host")
RATE_SCHEDULES = ("cosine", "constant")  # of `OptimizerConfig`
_TICKS_PER_STAGE = 4  # the most microbatches per stage, without --microbatches


def parse_mesh(text: str) -> dict[str, int]:
    """Return axis sizes by name from a text like "replica=2,stage=2", in the order of `AXES`.

    Raises:
      ValueError: an axis is unknown or named twice, or a size is not a positive integer.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (x.strip() for x in part.partition("="))
        is_size = size.isascii() and size.isdigit() and 0 < int(size) < 2**20
        if name not in AXES or name in sizes or not is_size:
            raise ValueError(
                f"--mesh must be sizes of the axes {', '.join(AXES)}, each at most once, such as "
                f"replica=2,stage=2,fsdp=2; got {part.strip() or 'nothing'}"
            )
        sizes[name] = int(size)
    return {name: sizes[name] for name in AXES if name in sizes}


def _check_pipeline(flag: str, kind: str) -> None:
    if kind in RATE_SCHEDULES:
        raise ValueError(
            f"{flag} is that of a pipeline, and --rate-schedule that of the learning rate; got "
            f"{flag} {kind}"
        )


@dataclasses.dataclass(frozen=True)
class MeshConfig(Options):
    """The mesh axes of the devices, and the pipeline along the axis "stage"."""

    HEADING = "Device"

    mesh: Annotated[str | None, lambda flag, text: parse_mesh(text)] = None
    """Sizes of the axes of the devices, such as replica=2,stage=2,fsdp=2: replica, device (which
    share a batch), stage (of a pipeline), fsdp and tensor (which share the model). In place of
    --replicas and --devices-per-replica."""
    pipeline: Annotated[str, _check_pipeline, OneOf(*PIPELINES), Called("--schedule")] = (
        "one_f_one_b"
    )
    """Order of the operations of each pipeline stage; see jaxslowmo inspect schedule."""
    microbatches: Count | None = None
    """Parts of a batch that go through the stages one after the other (default: up to 4 per stage,
    as many as divide the batch)."""
    chunks: Count | None = None
    """Parts of the model on each stage (default: 2 for interleaved and zbv, else 1)."""
    executor: Annotated[str, OneOf(*EXECUTORS)] = "one_program"
    """One program on all stages, or programs of each stage that the host starts one by one, which
    wait less for each other but take a single process."""

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the axes in `--mesh`, by name."""
        return {} if self.mesh is None else parse_mesh(self.mesh)

    @property
    def model_axes(self) -> dict[str, int]:
        """The sizes of the axes that split the model, by name; axes of size 1 are left out."""
        return {name: n for name, n in self.sizes.items() if name in MODEL_AXES and n > 1}

    @property
    def num_stages(self) -> int:
        """The number of stages of the pipeline; 1 without a pipeline."""
        return self.sizes.get("stage", 1)

    def check_processes(self, count: int) -> None:
        """Raise `ValueError` if there are several processes but the executor needs a single one."""
        if self.executor == "host" and count > 1:
            raise ValueError(
                "--executor host starts the programs of all stages from a single process, got "
                f"{count} processes: use --executor one_program, which several can run"
            )

    def num_microbatches(self, rows: int) -> int:
        """Return the number of microbatches into which a batch is cut.

        Args:
          rows: windows that one device computes.

        Raises:
          ValueError: `--microbatches` does not divide `rows`.
        """
        if self.num_stages == 1:
            return 1
        if self.microbatches is None:
            most = _TICKS_PER_STAGE * self.num_stages
            fit = [m for m in range(1, most + 1) if rows % m == 0]
            # A multiple of the number of stages, if possible: the interleaved schedule needs one.
            whole = [m for m in fit if m % self.num_stages == 0]
            return max(whole or fit)
        if rows % self.microbatches:
            raise ValueError(
                f"--microbatches must divide the {rows} windows of --batch that devices compute "
                f"together, got {self.microbatches}"
            )
        return self.microbatches
