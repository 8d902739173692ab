"""Outer steps with a delay on TPUs: permutes, beside which forward and backward pass run."""

import pytest

import jaxslowmo as js
from support import outer_programs
from support.tpu_schedule import read_schedule
from support.tpu_slices import tpu_mesh

REPLICAS = 8


@pytest.fixture(scope="module")
def mesh():
    return tpu_mesh("v5e:2x4", {"replica": REPLICAS})


@pytest.fixture(scope="module")
def programs(mesh):
    return outer_programs.lowered(mesh)


def test_an_update_that_sends_nothing_holds_no_collective(programs, mesh):
    for kind in ("local", "take 0"):
        report = js.comm_report_of({kind: programs[kind]}, mesh=mesh)
        assert not report.select(level="compiled")


@pytest.mark.parametrize("kind", ["send 0", "send 1+slow 1"])
def test_all_products_run_between_the_first_start_and_the_last_end(programs, mesh, kind):
    schedule = read_schedule(programs[kind].compile().as_text())
    assert schedule.num_products == outer_programs.PRODUCTS
    assert (schedule.blocking, schedule.in_branches) == (0, 0)
    assert len(schedule.starts) == 2 * (REPLICAS - 1)
    inner = [p for p in schedule.products if min(schedule.starts) < p < max(schedule.dones)]
    assert len(inner) >= len(schedule.products) - (2 if "slow" in kind else 0)
    report = js.comm_report_of({kind: programs[kind]}, mesh=mesh)
    sent = report.bytes(kind=kind, level="compiled", collective="collective-permute")
    part = outer_programs.BYTES / 2 / outer_programs.DELAY
    assert sent == pytest.approx(2 * (REPLICAS - 1) / REPLICAS * part, rel=0.01)


def test_with_one_program_an_exchange_that_any_update_may_make_stands_in_no_branch(mesh):
    schedule = read_schedule(outer_programs.lowered_traced(mesh).compile().as_text())
    assert schedule.num_products == outer_programs.PRODUCTS
    assert len(schedule.starts) == 2 * (REPLICAS - 1)
    inner = [p for p in schedule.products if min(schedule.starts) < p < max(schedule.dones)]
    assert len(inner) == len(schedule.products)
