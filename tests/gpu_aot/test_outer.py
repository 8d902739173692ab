"""Outer steps with a delay on GPUs: each update sends its part beside forward and backward pass."""

import pytest

from support import outer_programs
from support.gpu_hosts import gpu_mesh
from support.gpu_schedule import read_gpu_schedule


@pytest.fixture(scope="module")
def programs():
    return outer_programs.lowered(gpu_mesh({"replica": 8}))


def schedule_of(lowered):
    schedule = read_gpu_schedule(lowered.compile().as_text())
    assert schedule.num_products == outer_programs.PRODUCTS
    assert schedule.in_branches == 0
    return schedule


@pytest.mark.parametrize("kind", ["local", "take 0"])
def test_updates_that_send_nothing_hold_no_collective(programs, kind):
    assert schedule_of(programs[kind]).transfers == ()


@pytest.mark.parametrize("kind", ["send 0", "send 1+slow 1"])
def test_a_part_travels_beside_most_products(programs, kind):
    """A third of half of the parameters, in one asynchronous all-reduce.

    XLA starts it a few products late, as its estimate of the transfer is short.
    """
    (sent,) = schedule_of(programs[kind]).transfers
    part = outer_programs.BYTES / 2 / outer_programs.DELAY
    assert (sent.collective, sent.is_blocking) == ("all-reduce", False)
    assert part <= sent.bytes <= part + 16
    assert 3 * len(sent.products) >= 2 * outer_programs.PRODUCTS


def test_with_one_program_an_exchange_that_any_update_may_make_stands_in_no_branch():
    lowered = outer_programs.lowered_traced(gpu_mesh({"replica": 8}))
    schedule = read_gpu_schedule(lowered.compile().as_text())
    assert schedule.num_products == outer_programs.PRODUCTS
    (sent,) = schedule.transfers
    part = outer_programs.BYTES / outer_programs.DELAY
    assert (sent.collective, sent.is_blocking) == ("all-reduce", False)
    assert part <= sent.bytes <= part + 16
    assert 3 * len(sent.products) >= 2 * outer_programs.PRODUCTS
