"""Training steps of every algorithm for one TPU slice and for four, compiled once.

What `tests/tpu_aot/test_proofs.py` proves, and what `benchmarks/tpu_proofs.py` prints as a table.
"""

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

import jaxslowmo as js
from support.described import compiled_rows, lowered_step
from support.tpu_schedule import Schedule, read_schedule
from support.tpu_slices import slices_mesh

# An MLP of uneven layers with biases, 1.13 M float32 parameters.
WIDTHS = (512, 768, 640, 384)
PARAMS = {
    f"layer{i}": {
        "kernel": jax.ShapeDtypeStruct(shape, jnp.float32),
        "bias": jax.ShapeDtypeStruct(shape[1:], jnp.float32),
    }
    for i, shape in enumerate(itertools.pairwise(WIDTHS))
}
NUM_PARAMETERS = sum(prod(leaf.shape) for leaf in jax.tree.leaves(PARAMS))
# Forward, and backward to the weights and (but for the first layer) to the input.
NUM_PRODUCTS = 3 * (len(WIDTHS) - 1) - 1
ROWS_PER_CHIP = 32
BUCKET_BYTES = 2**20
NUM_BUCKETS = 2


def loss(params: Any, batch: jax.Array) -> jax.Array:
    x = batch
    for name in sorted(params):
        x = jnp.tanh(x @ params[name]["kernel"] + params[name]["bias"])
    return jnp.mean(jnp.square(x))


@dataclass(frozen=True)
class Place:
    """Where a step runs: R replicas of L chips each; with several slices a replica is a slice."""

    name: str
    topology: str
    num_slices: int
    axes: tuple[tuple[str, int], ...]

    @property
    def replicas(self) -> int:
        return dict(self.axes)["replica"]

    @property
    def chips(self) -> int:
        """The number of chips of one replica."""
        return dict(self.axes).get("device", 1)

    @property
    def transform_options(self) -> dict[str, Any]:
        """The options of transforms that run over "replica"."""
        return {"local_axis_name": "device"} if self.chips > 1 else {}

    @functools.cached_property
    def mesh(self) -> jax.sharding.Mesh:
        return slices_mesh(self.topology, dict(self.axes), num_slices=self.num_slices)


ONE_SLICE = Place("v5e:2x4", "v5e:2x4", 1, (("replica", 8),))
FOUR_SLICES = Place("4 x v5e:4x4", "v5e:4x4", 4, (("replica", 4), ("device", 16)))
PLACES = (ONE_SLICE, FOUR_SLICES)

# Keeps the all-reduces of different buckets apart inside a slice.
APART = {"xla_jf_crs_combiner_threshold_count": "1"}
ALGORITHMS = (
    "all_reduce",
    "all_reduce, option",
    "local_sgd",
    "sgp overlap=0",
    "sgp overlap=1",
    "slowmo(local_sgd)",
    "slowmo(local_sgd), unsharded",
    "slowmo(sgp overlap=1)",
    "diloco",
    "diloco, unsharded",
)
CASES = [
    (algorithm, place)
    for place in PLACES
    for algorithm in ALGORITHMS
    # Inside one slice nothing overlaps with the option either, see `docs/tpu.md`.
    if algorithm != "all_reduce, option" or place.num_slices > 1
]


def _transforms(algorithm: str, place: Place) -> dict[str, Any]:
    """Return the `sync` or `gradients` of a step."""
    local_options = place.transform_options
    if algorithm.startswith("all_reduce"):
        axes = tuple(name for name, _ in place.axes)
        order = js.ready_order(loss, PARAMS, jax.ShapeDtypeStruct((8, WIDTHS[0]), jnp.float32))
        return {
            "gradients": js.all_reduce_gradients(
                axes,
                bucket_bytes=BUCKET_BYTES,
                first_bucket_bytes=BUCKET_BYTES,
                order=order,
            )
        }
    options = {**local_options, "shard_state": "unsharded" not in algorithm}
    average = js.local_sgd("replica", **local_options)
    overlapped = js.sgp("replica", overlap=1, **local_options)
    return {
        "sync": {
            "local_sgd": lambda: average,
            "sgp overlap=0": lambda: js.sgp("replica", overlap=0, **local_options),
            "sgp overlap=1": lambda: overlapped,
            "slowmo(local_sgd)": lambda: js.slowmo("replica", base=average, **options),
            "slowmo(sgp overlap=1)": lambda: js.slowmo("replica", base=overlapped, **options),
            "diloco": lambda: js.diloco("replica", **options),
        }[algorithm.removesuffix(", unsharded")]()
    }


@functools.cache
def lowered(algorithm: str, place: Place) -> Mapping[str, jax.stages.Lowered]:
    """Return the programs of a host-scheduled step, by kind of step."""
    batch = jax.ShapeDtypeStruct((ROWS_PER_CHIP * place.mesh.size, WIDTHS[0]), jnp.float32)
    transforms = {"sync": None, **_transforms(algorithm, place)}
    return lowered_step(loss, params=PARAMS, batch=batch, mesh=place.mesh, **transforms)


def kinds(algorithm: str, place: Place) -> list[str]:
    """Return the kinds of step that are compiled; `test_what_is_left_out` says why these suffice.

    One round of gossip stands for all, and the averages of `local_sgd` for those of slowmo's base.
    Of unsharded state only the memory is of interest: the local step, which carries it, will do.
    """
    all_kinds = list(lowered(algorithm, place))
    if "unsharded" in algorithm:
        return ["local"]
    left_out = {"average"} if algorithm.startswith("slowmo") else set()
    return [k for k in all_kinds if k not in left_out and (k == "round 0" or k[:5] != "round")]


@dataclass(frozen=True)
class Facts:
    """What a compiled program does on each chip.

    Attributes:
      rows: its collectives.
      schedule: the order in which things run.
      text: the program.
      argument_bytes: memory of parameters, state of all transforms, and batch.
      temporary_bytes: memory besides, while it runs.
    """

    rows: tuple[js.CommRow, ...]
    schedule: Schedule
    text: str
    argument_bytes: int
    temporary_bytes: int

    def bytes_sent(self, axis: str) -> int:
        """Return the bytes that a chip sends over an axis, where each collective runs as a ring."""
        return sum(row.wire_bytes for row in self.rows if axis in row.axis.split(","))

    def counts(self, axis: str) -> dict[str, int]:
        """Return the number of collectives of each kind that run over an axis."""
        counts_by_kind: dict[str, int] = {}
        for row in self.rows:
            if axis in row.axis.split(","):
                counts_by_kind[row.collective] = counts_by_kind.get(row.collective, 0) + row.count
        return counts_by_kind


@functools.cache
def facts(algorithm: str, place: Place, kind: str) -> Facts:
    """Compile one program, once; return what it does on each chip."""
    program = lowered(algorithm, place)[kind]
    options: Any = APART if algorithm.endswith(", option") else None
    compiled = program.compile(compiler_options=options)
    text = compiled.as_text() or ""
    memory = compiled.memory_analysis()
    assert memory is not None
    schedule = read_schedule(text)
    assert schedule.num_products == NUM_PRODUCTS
    return Facts(
        rows=compiled_rows(kind, program, compiled, place.mesh),
        schedule=schedule,
        text=text,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
    )
