"""A simulated step as a file."""

import pytest

import jaxslowmo as js


@pytest.mark.parametrize(("ending", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_picture_in_the_format_of_its_ending(tmp_path, ending, begins):
    path = tmp_path / f"schedule.{ending}"
    simulation = js.schedules.zbv(2, 3).simulate()
    js.reports.schedule_picture(
        simulation, path, title="ZB-V", lines=["two stages", "three microbatches"]
    )
    assert path.read_bytes().startswith(begins)
    if ending == "svg":
        assert path.read_text().count('id="patch_') > sum(map(len, simulation.timeline))


def test_operations_that_take_no_time(tmp_path):
    simulation = js.schedules.zero_bubble(2, 2).simulate(backward_weight=0.0)
    js.reports.schedule_picture(simulation, tmp_path / "schedule.png")
    assert (tmp_path / "schedule.png").exists()
