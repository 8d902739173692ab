"""`js.comm_report` agrees with the reader of schedules on every program compiled for GPUs."""

from collections import Counter
from math import prod

import jax

from support import gpu_programs, gpu_steps
from support.gpu_schedule import Schedule, collectives_run
from support.steps_of_algorithms import Facts, kinds


def check_agreement(facts: Facts[Schedule], mesh: jax.sharding.Mesh) -> None:
    """The same number of collectives of each kind, with the same bytes; loops included.

    The reader counts what comes out of a collective, and the report what all devices together put
    into a reduce-scatter. So the sizes of the axes that the report names are checked, too.
    """
    reported: Counter[tuple[str, str]] = Counter()
    for row in facts.rows:
        group = prod(mesh.shape[name] for name in row.axis.split(","))
        parts = group if row.collective == "reduce-scatter" else 1
        reported[row.collective, "count"] += row.count
        reported[row.collective, "bytes"] += row.bytes // parts
    assert reported == collectives_run(facts.text)


@gpu_steps.each_of(gpu_steps.CASES)
def test_steps_of_algorithms(algorithm, place):
    for kind in kinds(algorithm, place):
        check_agreement(gpu_steps.facts(algorithm, place, kind), place.mesh)


@gpu_programs.each_of(*(name for programs in gpu_programs.KINDS.values() for name in programs))
def test_all_other_programs(name):
    one = gpu_programs.program(name)
    check_agreement(one.facts, one.mesh)
