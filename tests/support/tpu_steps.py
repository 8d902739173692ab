"""Training steps of every algorithm for one TPU slice and for four, compiled once.

What `tests/tpu_aot/test_proofs.py` proves, and what `benchmarks/tpu_proofs.py` prints as a table.
"""

import functools
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import jax

from support.steps_of_algorithms import (
    NUM_PRODUCTS,
    OPTION,
    Facts,
    Place,
    cases_of,
    lowered,
    read_facts,
)
from support.table_of_steps import Table
from support.tpu_schedule import Schedule, read_schedule
from support.tpu_slices import slices_mesh

NUM_BUCKETS = 2


@dataclass(frozen=True)
class Slices(Place):
    """Where a step runs: on one TPU slice or several.

    Attributes:
      topology: topology of a slice.
    """

    topology: str

    @functools.cached_property
    def mesh(self) -> jax.sharding.Mesh:
        return slices_mesh(self.topology, dict(self.axes), num_slices=self.num_groups)


ONE_SLICE = Slices("v5e:2x4", 1, (("replica", 8),), "v5e:2x4")
FOUR_SLICES = Slices("4 x v5e:4x4", 4, (("replica", 4), ("device", 16)), "v5e:4x4")
PLACES = (ONE_SLICE, FOUR_SLICES)

OPTIONS = {
    # Keeps the all-reduces of different buckets apart inside a slice. (On one slice nothing
    # overlaps with the option either, see `benchmarks/results/tpu_programs.md`.)
    "all_reduce": {"xla_jf_crs_combiner_threshold_count": "1"},
}
CASES = cases_of(PLACES, OPTIONS)


@functools.cache
def facts(algorithm: str, place: Place, kind: str) -> Facts[Schedule]:
    """Compile one program, once; return what it does on each chip."""
    program = lowered(algorithm, place)[kind]
    options: Any = OPTIONS[algorithm.removesuffix(OPTION)] if algorithm.endswith(OPTION) else None
    compiled = program.compile(compiler_options=options)
    program_facts = read_facts(kind, program, compiled, place.mesh, read_schedule)
    assert program_facts.schedule.num_products == NUM_PRODUCTS
    return program_facts


TABLE = Table(
    script="benchmarks/tpu_proofs.py",
    page="benchmarks/results/tpu_programs.md",
    versions=f"jax {jax.__version__}, libtpu {version('libtpu')}.",
    device="chip",
    group="slice",
    cases=CASES,
    facts=facts,
)
