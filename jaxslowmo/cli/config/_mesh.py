"""Options of training about the axes of its devices, and the schedule of a pipeline along one."""

import dataclasses
import functools
import math

from ._fields import Checked, option

# In this order from slow links to fast ones, as a mesh of them lays its devices out.
AXES = ("replica", "device", "stage", "fsdp", "tensor")
# Those over which a model is shared; "device" shares the batch alone.
MODEL_AXES = ("stage", "fsdp", "tensor")
# Those of the library, in its order, which tests compare; to read its lists would load jax.
PIPELINES = ("gpipe", "one_f_one_b", "interleaved", "zero_bubble", "zbv", "lockstep")
EXECUTORS = ("one_program", "host")
_TICKS_PER_STAGE = 4  # microbatches per stage where nobody says how many


def parse_mesh(text: str) -> dict[str, int]:
    """Sizes by name of "replica=2,stage=2,fsdp=2", in the order of `AXES`.

    Raises:
      ValueError: an unknown axis, one that is named twice, or a size that is none.
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (x.strip() for x in part.partition("="))
        if not equals or not (size.isascii() and size.isdigit()) or not 0 < int(size) < 2**20:
            raise ValueError(
                "--mesh must be sizes of axes such as replica=2,stage=2,fsdp=2, got "
                f"{part.strip() or 'nothing'}"
            )
        if name not in AXES:
            raise ValueError(f"--mesh has the axes {', '.join(AXES)}, got {name or 'nothing'}")
        if name in found:
            raise ValueError(f"--mesh must name each axis once, got {name} again")
        found[name] = int(size)
    return {name: found[name] for name in AXES if name in found}


_option = functools.partial(option, panel="Devices")


@dataclasses.dataclass(frozen=True)
class MeshConfig(Checked):
    """Over which axes a replica is shared."""

    mesh: str | None = _option(
        None,
        "Sizes of the axes of the devices, such as replica=2,stage=2,fsdp=2: replica, device "
        "(which share a batch), stage (of a pipeline), fsdp and tensor (which share the model). In "
        "place of --replicas and --devices-per-replica.",
        check=parse_mesh,
    )
    pipeline: str = _option(
        "one_f_one_b",
        "Of the stages: which computes what when; see jaxslowmo inspect schedule.",
        choices=PIPELINES,
        flag="--schedule",
    )
    microbatches: int | None = _option(
        None,
        "Of the stages: parts of a batch that go through them one after the other (default: up to "
        f"{_TICKS_PER_STAGE} per stage, as many as divide the batch).",
        least=1,
    )
    chunks: int | None = _option(
        None,
        "Of the stages: parts of the model on each (default: 2 of interleaved, zbv; else 1).",
        least=1,
    )
    executor: str = _option(
        "one_program",
        "Of the stages: one program on all of them, or programs of each stage that the host starts "
        "one by one, which wait less for each other but take a single process.",
        choices=EXECUTORS,
    )

    @property
    def sizes(self) -> dict[str, int]:
        """Of the axes that were given, by name."""
        return {} if self.mesh is None else parse_mesh(self.mesh)

    @property
    def model_axes(self) -> dict[str, int]:
        """Sizes of the axes over which the model is shared; of size 1 there are none."""
        return {name: n for name, n in self.sizes.items() if name in MODEL_AXES and n > 1}

    @property
    def num_stages(self) -> int:
        """Of the pipeline; 1 without one."""
        return self.sizes.get("stage", 1)

    def check_processes(self, count: int) -> None:
        """Raise `ValueError` for several processes where one has to start all programs."""
        if self.executor == "host" and count > 1:
            raise ValueError(
                "--executor host starts the programs of all stages from a single process, got "
                f"{count} processes: use --executor one_program, which several can run"
            )

    def num_microbatches(self, rows: int) -> int:
        """How many a batch of so many rows of one device is cut into.

        Raises:
          ValueError: a number that was given does not divide them.
        """
        if self.num_stages == 1:
            return 1
        if self.microbatches is None:
            most = _TICKS_PER_STAGE * self.num_stages
            fit = [m for m in range(1, most + 1) if rows % m == 0]
            # The interleaved order goes through the stages in rounds of as many microbatches.
            whole = [m for m in fit if m % self.num_stages == 0]
            return max(whole or fit)
        if rows % self.microbatches:
            raise ValueError(
                f"--microbatches must divide the {rows} windows of --batch that devices compute "
                f"together, got {self.microbatches}"
            )
        return self.microbatches


def check_mesh(config: MeshConfig, replicas: int, devices_per_replica: int, batch: int) -> None:
    """Refuses what does not fit the rest of a run.

    Args:
      config: the axes.
      replicas: as the run has them.
      devices_per_replica: those of the axis "device".
      batch: windows of a replica in one microbatch of `--accumulate`.

    Raises:
      ValueError: two options that say different things, sizes that do not divide others.
    """
    if config.mesh is None:
        return
    for name, flag, value in (
        ("replica", "--replicas", replicas),
        ("device", "--devices-per-replica", devices_per_replica),
    ):
        size = config.sizes.get(name, 1)
        if size != value:
            raise ValueError(
                f"--mesh and {flag} contradict each other: {config.mesh} has {size} along {name}, "
                f"got {value}; leave {flag} out"
            )
    shares = math.prod(config.sizes.get(name, 1) for name in ("device", "fsdp"))
    if batch % shares:
        raise ValueError(
            f"--batch must be a multiple of --accumulate times the sizes of device and fsdp in "
            f"--mesh {config.mesh}: got {batch} windows for {shares} devices"
        )
    config.num_microbatches(batch // shares)
