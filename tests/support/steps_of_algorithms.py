"""Training steps of every algorithm, and what is read off them when they are compiled.

`support.tpu_steps` and `support.gpu_steps` say for which devices, and with which options.
"""

import abc
import functools
import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp

import jaxslowmo as js
from support.bytes_of_steps import PADDED_TO, bytes_sent
from support.described import compiled_rows, lowered_step
from support.reports import merged

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
ROWS_PER_DEVICE = 32
BUCKET_BYTES = 2**20

ALGORITHMS = (
    "all_reduce",
    "local_sgd",
    "sgp overlap=0",
    "sgp overlap=1",
    "slowmo(local_sgd)",
    "slowmo(local_sgd), unsharded",
    "slowmo(sgp overlap=1)",
    "diloco",
    "diloco, unsharded",
)
SHARDED = ("slowmo(local_sgd)", "diloco")
# Ends the name of an algorithm that is compiled with an option of the compiler.
OPTION = ", option"


def loss(params: Any, batch: jax.Array) -> jax.Array:
    x = batch
    for name in sorted(params):
        x = jnp.tanh(x @ params[name]["kernel"] + params[name]["bias"][None])
    return jnp.mean(jnp.square(x))


@dataclass(frozen=True)
class Place(abc.ABC):
    """Where a step runs: R replicas of L devices each.

    Attributes:
      name: its name in tables.
      num_groups: number of groups of devices with a fast network inside: TPU slices or GPU hosts.
        With several groups each is a replica.
      axes: names and sizes of the mesh's axes.
    """

    name: str
    num_groups: int
    axes: tuple[tuple[str, int], ...]

    @property
    def replicas(self) -> int:
        return dict(self.axes)["replica"]

    @property
    def devices(self) -> int:
        """The number of devices of one replica."""
        return dict(self.axes).get("device", 1)

    @property
    def transform_options(self) -> dict[str, Any]:
        """The options of transforms that run over "replica"."""
        return {"local_axis_name": "device"} if self.devices > 1 else {}

    @property
    @abc.abstractmethod
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh of described devices."""


def cases_of(places: tuple[Place, ...], with_option: Collection[str]) -> list[tuple[str, Any]]:
    """Return the cases, each an algorithm and its place.

    Args:
      places: all places.
      with_option: algorithms that are compiled with an option, too, where there are several groups.
    """
    cases = []
    for place in places:
        for algorithm in ALGORITHMS:
            cases.append((algorithm, place))
            if algorithm in with_option and place.num_groups > 1:
                cases.append((algorithm + OPTION, place))
    return cases


def _transforms(algorithm: str, place: Place) -> dict[str, Any]:
    """Return the `sync` or `gradients` of a step."""
    local_options = place.transform_options
    if algorithm == "all_reduce":
        axes = tuple(name for name, _ in place.axes)
        order = js.gradients.ready_order(
            loss, PARAMS, jax.ShapeDtypeStruct((8, WIDTHS[0]), jnp.float32)
        )
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


def lowered(algorithm: str, place: Place) -> Mapping[str, jax.stages.Lowered]:
    """Return the programs of a host-scheduled step, by kind of step."""
    return _lowered(algorithm.removesuffix(OPTION), place)


@functools.cache
def _lowered(algorithm: str, place: Place) -> Mapping[str, jax.stages.Lowered]:
    batch = jax.ShapeDtypeStruct((ROWS_PER_DEVICE * place.mesh.size, WIDTHS[0]), jnp.float32)
    transforms = {"sync": None, **_transforms(algorithm, place)}
    return lowered_step(loss, params=PARAMS, batch=batch, mesh=place.mesh, **transforms)


def emitted(algorithm: str, place: Place) -> js.reports.CommReport:
    """Return the report on what the programs of a step ask for, which are not compiled for it."""
    return js.comm_report_of(lowered(algorithm, place), mesh=place.mesh, compile=False)


def kinds(algorithm: str, place: Place) -> list[str]:
    """Return the kinds of step that are compiled; `check_what_is_left_out` shows why these suffice.

    One round of gossip stands for all, and the averages of `local_sgd` for those of slowmo's base.
    Of unsharded state only the memory is of interest: the local step, which carries it, will do.
    Options are for what travels beside the gradients, so slow steps are compiled without.
    """
    all_kinds = list(lowered(algorithm, place))
    if "unsharded" in algorithm:
        return ["local"]
    left_out = {"average"} if algorithm.startswith("slowmo") else set()
    left_out |= {"slow"} if algorithm.endswith(OPTION) else set()
    return [k for k in all_kinds if k not in left_out and (k == "round 0" or k[:5] != "round")]


def check_what_is_left_out(place: Place) -> None:
    """Other rounds send what the first one sends, and slowmo's base what it sends alone."""

    def amounts(algorithm: str, kind: str) -> frozenset[Any]:
        rows = merged(emitted(algorithm, place).select(kind=kind))
        return frozenset((row.axis, row.collective, row.count, row.bytes) for row in rows)

    for algorithm in ("sgp overlap=0", "sgp overlap=1", "slowmo(sgp overlap=1)"):
        rounds = [kind for kind in lowered(algorithm, place) if kind.startswith("round")]
        assert len(rounds) == (place.replicas - 1).bit_length()
        assert len({amounts(algorithm, kind) for kind in rounds}) == 1
    average = amounts("local_sgd", "average")
    assert average == amounts("slowmo(local_sgd)", "average") != frozenset()


S = TypeVar("S")


@dataclass(frozen=True)
class Facts(Generic[S]):
    """What a compiled program does on each device.

    Attributes:
      rows: its collectives.
      schedule: the order in which things run.
      text: the program.
      argument_bytes: memory of parameters, state of all transforms, and batch.
      temporary_bytes: memory besides, while it runs.
    """

    rows: tuple[js.reports.CommRow, ...]
    schedule: S
    text: str
    argument_bytes: int
    temporary_bytes: int

    def bytes_sent(self, axis: str) -> int:
        """Return the bytes that a device sends over an axis, if each collective runs as a ring.

        What runs over several axes at a time counts for the first of them.
        """
        return sum(row.wire_bytes for row in self.rows if row.axis.split(",")[0] == axis)

    def counts(self, axes: str) -> dict[str, int]:
        """Return the number of collectives of each kind that run over `axes`, as in a row."""
        counts_by_kind: dict[str, int] = {}
        for row in self.rows:
            if row.axis == axes:
                counts_by_kind[row.collective] = counts_by_kind.get(row.collective, 0) + row.count
        return counts_by_kind


def read_facts(
    kind: str,
    program: jax.stages.Lowered,
    compiled: jax.stages.Compiled,
    mesh: jax.sharding.Mesh,
    read: Callable[[str], S],
) -> Facts[S]:
    """Return what a program does on each device.

    Args:
      kind: kind of the step.
      program: the program.
      compiled: the same, compiled.
      mesh: its mesh of described devices.
      read: reads the schedule of the compiled text.
    """
    text = compiled.as_text() or ""
    memory = compiled.memory_analysis()
    assert memory is not None
    return Facts(
        rows=compiled_rows(kind, program, compiled, mesh),
        schedule=read(text),
        text=text,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
    )


def check_bytes(found: Facts[Any], formula: str, place: Place, *together: str) -> None:
    """Assert that bytes are as computed, padding included, over each axis or both `together`."""
    expected = bytes_sent(formula, NUM_PARAMETERS, place.replicas, place.devices)
    sent = found.bytes_sent("replica"), found.bytes_sent("device")
    assert sent == (expected.replica, expected.device)
    assert {row.axis for row in found.rows} <= {"replica", "device", *together}
    assert all(row.dtypes == ("float32",) for row in found.rows)


def check_memory_of_sharded_state(
    facts: Callable[[str, Any, str], Facts[Any]], algorithm: str, place: Place
) -> None:
    """Assert that anchor and momentum take 2 N (1 - 1/R) bytes less, but for leaves left whole."""
    sharded = facts(algorithm, place, "local").argument_bytes
    saved = facts(f"{algorithm}, unsharded", place, "local").argument_bytes - sharded
    ideal = 2 * 4 * NUM_PARAMETERS * (1 - 1 / place.replicas)
    # A TPU pads small arrays that are whole on each replica to tiles of 4 KiB.
    assert -4 * 4096 <= ideal - saved <= 2 * place.devices * 4 * PADDED_TO
    # A slow step holds the same state.
    assert facts(algorithm, place, "slow").argument_bytes == sharded
