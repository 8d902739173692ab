"""Outer steps with a delay on GPUs: each update sends its part beside forward and backward pass."""

from support import outer_programs
from support.gpu_hosts import gpu_mesh
from support.gpu_schedule import read_gpu_schedule


def test_parts_travel_beside_most_products_and_other_updates_send_nothing():
    """A part is one asynchronous all-reduce; with one program, too, it stands in no branch.

    XLA starts it a few products late, as its estimate of the transfer is short.
    """
    mesh = gpu_mesh({"replica": 8})
    programs = outer_programs.lowered(mesh)
    traced = outer_programs.lowered_traced(mesh)
    part = outer_programs.BYTES / outer_programs.DELAY  # with two fragments, of the half of them
    for lowered, nbytes in (
        (programs["local"], 0),
        (programs["take 0"], 0),
        (programs["send 1+slow 1"], part / 2),
        (traced, part),
    ):
        schedule = read_gpu_schedule(lowered.compile().as_text())
        assert schedule.num_products == outer_programs.PRODUCTS
        assert lowered is traced or schedule.in_branches == 0
        if not nbytes:
            assert schedule.transfers == ()
            continue
        (sent,) = schedule.transfers
        assert (sent.collective, sent.is_blocking) == ("all-reduce", False)
        assert nbytes <= sent.bytes <= nbytes + 16
        assert 3 * len(sent.products) >= 2 * outer_programs.PRODUCTS
