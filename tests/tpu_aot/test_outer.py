"""Outer steps with a delay on TPUs: permutes, beside which forward and backward pass run."""

import pytest

import jaxslowmo as js
from support import outer_programs
from support.tpu_schedule import read_schedule
from support.tpu_slices import tpu_mesh

REPLICAS = 8


def test_parts_travel_beside_products_and_other_updates_send_nothing():
    """Beside all of them; an outer step in the same update may take two."""
    mesh = tpu_mesh("v5e:2x4", {"replica": REPLICAS})
    programs = outer_programs.lowered(mesh)
    kinds = ("local", "take 0", "send 1+slow 1")
    compiled = {kind: programs[kind].compile() for kind in kinds}
    compiled["traced"] = outer_programs.lowered_traced(mesh).compile()
    for kind, program in compiled.items():
        schedule = read_schedule(program.as_text())
        rows = js.comm_report_of(program, mesh=mesh).select(level="compiled")
        assert schedule.num_products == outer_programs.PRODUCTS
        # With one program, an exchange that any update may make stands in no branch.
        assert (schedule.blocking, schedule.in_branches) == (0, 0)
        if kind in ("local", "take 0"):
            assert rows == ()
            continue
        assert len(schedule.starts) == 2 * (REPLICAS - 1)
        first, last = min(schedule.starts), max(schedule.dones)
        inner = [place for place in schedule.products if first < place < last]
        assert len(inner) >= len(schedule.products) - (2 if "slow" in kind else 0)
        if kind != "traced":
            part = outer_programs.BYTES / outer_programs.DELAY / 2  # of one fragment
            sent = sum(row.bytes for row in rows if row.collective == "collective-permute")
            assert sent == pytest.approx(2 * (REPLICAS - 1) / REPLICAS * part, rel=0.01)
