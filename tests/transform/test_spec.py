"""What a parameter transform says of itself, in four groups."""

import dataclasses

import pytest

import jaxslowmo as js


def test_the_schedule_of_one_event():
    schedule = js.ScheduleSpec.of("average", 3)
    assert [schedule.phase(t) for t in (2, 3)] == [(), ("average",)]
    assert [schedule.due(t) for t in (2, 3)] == [False, True]
    assert (schedule.schedules, schedule.events) == ((js.every(3),), ("average",))
    with pytest.raises(ValueError, match="`sync_every` counts updates"):
        js.ScheduleSpec.of("average", 0)


def test_an_algorithm_gives_two_groups():
    required = {
        f.name for f in dataclasses.fields(js.TransformSpec) if f.default is f.default_factory
    }
    assert required == {"schedule", "exchange"}


@pytest.mark.parametrize("group", ["schedule", "exchange", "checkpoint", "layout"])
def test_each_group_is_of_its_class(group):
    spec = js.local_sgd("replica").spec
    with pytest.raises(ValueError, match=rf"`{group}` must be a js\.\w+Spec\(\.\.\.\), got 3"):
        dataclasses.replace(spec, **{group: 3})


def test_names_of_all_groups_differ():
    """Each may be given and read by its name alone."""
    groups = (js.ScheduleSpec, js.ExchangeSpec, js.CheckpointSpec, js.LayoutSpec)
    names = [field.name for group in groups for field in dataclasses.fields(group)]
    assert len(names) == len(set(names))
    tx = js.local_sgd("replica")
    for name in names:
        getattr(tx, name)
