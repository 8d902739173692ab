"""Training steps of every algorithm for one host of GPUs and for four, compiled once.

What `tests/gpu_aot/test_proofs.py` proves, and what `benchmarks/gpu_proofs.py` prints as a table.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import jax
import pytest

from support.gpu_hosts import gpu_mesh
from support.gpu_schedule import Schedule, read_gpu_schedule
from support.steps_of_algorithms import (
    NUM_PRODUCTS,
    OPTION,
    Facts,
    Place,
    cases_of,
    lowered,
    read_facts,
)
from support.table_of_steps import Table, formula_kind


@dataclass(frozen=True)
class Hosts(Place):
    """Where a step runs: on one host of eight GPUs or several.

    Attributes:
      gpu: kind of the GPUs.
    """

    gpu: str = "H100"

    @functools.cached_property
    def mesh(self) -> jax.sharding.Mesh:
        return gpu_mesh(dict(self.axes), num_hosts=self.num_groups, gpu=self.gpu)


ONE_HOST = Hosts("8 H100", 1, (("replica", 8),))
FOUR_HOSTS = Hosts("4 x 8 H100", 4, (("replica", 4), ("device", 8)))
A100S = Hosts("8 A100", 1, (("replica", 8),), "A100")
PLACES = (ONE_HOST, FOUR_HOSTS)

OPTIONS: dict[str, Any] = {
    # By default one collective at a time is under way: what travels between hosts would wait for
    # the gradients' all-reduce inside of them.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 2,
    # The default for H100s. For A100s XLA puts no work beside collectives without it.
    "xla_gpu_enable_latency_hiding_scheduler": True,
}
OVERLAPPED = ("sgp overlap=1", "slowmo(sgp overlap=1)")
CASES = [
    *cases_of(PLACES, OVERLAPPED),
    ("sgp overlap=1", A100S),
    ("sgp overlap=1" + OPTION, A100S),
    ("diloco", A100S),
]


def group_of(place: Place) -> pytest.MarkDecorator:
    """Return the mark of tests that share the programs of places with as many hosts."""
    return pytest.mark.xdist_group(f"steps on {place.num_groups} x 8")


# Between hosts in `make test-exhaustive` alone: parts of others, or as inside of a host.
SELDOM_BETWEEN_HOSTS = ("local_sgd", "sgp overlap=0", "slowmo(local_sgd)", "slowmo(sgp overlap=1)")


def each_of(cases: Iterable[tuple[str, Any]]) -> pytest.MarkDecorator:
    """Return the mark of a test that takes these algorithms and places."""
    parameters = []
    for algorithm, place in cases:
        marks = [group_of(place)]
        between = algorithm in SELDOM_BETWEEN_HOSTS or "unsharded" in algorithm
        if (place is FOUR_HOSTS and between) or (algorithm, place) == ("diloco", A100S):
            marks.append(pytest.mark.exhaustive)
        parameters.append(
            pytest.param(algorithm, place, marks=marks, id=f"{algorithm} on {place.name}")
        )
    return pytest.mark.parametrize(("algorithm", "place"), parameters)


def formula(kind: str, place: Place) -> str:
    """Return the kind in `bytes_sent`: gradients over both axes are one all-reduce on GPUs."""
    return "flat" if kind == "every" and place.devices > 1 else formula_kind(kind)


@functools.cache
def facts(algorithm: str, place: Place, kind: str) -> Facts[Schedule]:
    """Compile one program, once; return what it does on each GPU."""
    program = lowered(algorithm, place)[kind]
    options = OPTIONS if algorithm.endswith(OPTION) else None
    compiled = program.compile(compiler_options=options)
    program_facts = read_facts(kind, program, compiled, place.mesh, read_gpu_schedule)
    assert program_facts.schedule.num_products == NUM_PRODUCTS
    return program_facts


TABLE = Table(
    script="benchmarks/gpu_proofs.py",
    page="benchmarks/results/gpu_programs.md",
    versions=f"jax {jax.__version__}, jax-cuda13-plugin {version('jax-cuda13-plugin')}.",
    device="GPU",
    group="host",
    cases=CASES,
    facts=facts,
    formula=formula,
    varying=("beside a transfer", "temporary"),
)
