"""Device groups: every textual form that the compilers print, and the axes they stand for."""

import pytest

from jaxslowmo.reports._hlo import MeshAxes, axis_of, device_order, parse_groups

DEVICE = ((0, 1, 2, 3), (4, 5, 6, 7))
REPLICA = ((0, 4), (1, 5), (2, 6), (3, 7))
ALL = (tuple(range(8)),)
MESH = MeshAxes((("replica", 2), ("device", 4)), tuple(range(8)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", DEVICE),
        ("{}", ()),
        ("[2,4]<=[8]", DEVICE),
        ("[4,2]<=[2,4]T(1,0)", REPLICA),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['replica'=2,'device'=4] {'replica','device'}", ALL),
        ("mesh['axis_0'=2,'axis_1'=4,'axis_2'=1] {'axis_1'}", DEVICE),
        ("mesh['r'=2,'fsdp'=4] {'fsdp':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        (
            "mesh['axis_0'=4,'axis_1'=2], device_ids=([2,2,2]T(0,2,1)) {'axis_0':(2)2}",
            ((0, 1), (2, 3), (4, 5), (6, 7)),
        ),
        ("something else", None),
    ],
)
def test_parse_groups(text, expected):
    groups = parse_groups(text)
    if expected is None:
        assert groups is None
    else:
        assert sorted(groups) == sorted(expected)


def test_device_order():
    assert device_order("", 3) == (0, 1, 2)
    assert device_order("[6]<=[2,3]T(1,0)", 6) == (0, 3, 1, 4, 2, 5)
    assert device_order("2, 0, 1", 3) == (2, 0, 1)


@pytest.mark.parametrize(
    ("groups", "are_pairs", "expected"),
    [
        (((3, 2, 1, 0), (7, 6, 5, 4)), False, ("device", 4)),
        (REPLICA, False, ("replica", 2)),
        ((), False, ("replica,device", 8)),
        (((0,), (1,)), False, ("?", 1)),
        (((0, 1), (2, 3), (4, 5), (6, 7)), False, ("?", 2)),
        (DEVICE[:1], False, ("?", 4)),
        (None, False, ("?", 0)),
        (((0, 1), (1, 2), (7, 4)), True, ("device", 4)),
        (((0, 5), (5, 0)), True, ("replica,device", 8)),
        (((0, 0), (1, 1)), True, ("?", 1)),
        (((0, 9),), True, ("?", 2)),
    ],
)
def test_axis_of_groups_and_of_pairs(groups, are_pairs, expected):
    assert axis_of(groups, are_pairs, (MESH,)) == expected


def test_meshes_with_axes_of_size_one_in_another_order_and_of_several():
    ones = MeshAxes((("one", 1), *MESH.axes[:1], ("uno", 1), *MESH.axes[1:]), MESH.ids)
    assert axis_of(REPLICA, False, (ones,)) == ("replica", 2)
    turned = MeshAxes((("a", 4), ("b", 2)), (0, 4, 1, 5, 2, 6, 3, 7))
    assert axis_of(REPLICA, False, (turned,)) == ("b", 2)
    # The first mesh that matches names the axis.
    other = MeshAxes((("x", 4), ("y", 2)), tuple(range(8)))
    assert axis_of(((0, 1), (2, 3), (4, 5), (6, 7)), False, (MESH, other)) == ("y", 2)
    assert axis_of(ALL, False, (other, MESH)) == ("x,y", 8)
