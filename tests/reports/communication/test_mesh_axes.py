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
        ("{{0,4},{4,0},{1,5}}", ((0, 4), (4, 0), (1, 5))),
        ("{}", ()),
        ("[2,4]<=[8]", DEVICE),
        ("[4,2]<=[2,4]T(1,0)", REPLICA),
        ("[1,8]<=[8]", ALL),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['replica'=2,'device'=4] {'replica'}", REPLICA),
        ("mesh['replica'=2,'device'=4] {'device'}", DEVICE),
        ("mesh['replica'=2,'device'=4] {'replica','device'}", ALL),
        ("mesh['axis_0'=2,'axis_1'=4,'axis_2'=1] {'axis_1'}", DEVICE),
        ("mesh['axis_0'=2,'one'=1] {'one'}", ((0,), (1,))),
        ("mesh['r'=2,'fsdp'=4] {'fsdp':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['r'=2,'fsdp'=4] {'fsdp':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", DEVICE),
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
    ("groups", "expected"),
    [
        (DEVICE, ("device", 4)),
        (((3, 2, 1, 0), (7, 6, 5, 4)), ("device", 4)),
        (REPLICA, ("replica", 2)),
        (ALL, ("replica,device", 8)),
        ((), ("replica,device", 8)),
        (((0,), (1,)), ("?", 1)),
        (((0, 1), (2, 3), (4, 5), (6, 7)), ("?", 2)),
        (DEVICE[:1], ("?", 4)),
        (None, ("?", 0)),
    ],
)
def test_axis_of_groups(groups, expected):
    assert axis_of(groups, False, (MESH,)) == expected


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        (((0, 1), (1, 2), (7, 4)), ("device", 4)),
        (((0, 4), (4, 0)), ("replica", 2)),
        (((0, 5), (5, 0)), ("replica,device", 8)),
        (((0, 0), (1, 1)), ("?", 1)),
        (((0, 0), (1, 2)), ("device", 4)),
        (((0, 9),), ("?", 2)),
    ],
)
def test_axis_of_pairs(pairs, expected):
    assert axis_of(pairs, True, (MESH,)) == expected


def test_meshes_with_axes_of_size_one_in_another_order_and_of_several():
    ones = MeshAxes((("one", 1), *MESH.axes[:1], ("uno", 1), *MESH.axes[1:]), MESH.ids)
    assert axis_of(REPLICA, False, (ones,)) == ("replica", 2)
    assert axis_of(ALL, False, (ones,)) == ("replica,device", 8)
    turned = MeshAxes((("a", 4), ("b", 2)), (0, 4, 1, 5, 2, 6, 3, 7))
    assert axis_of(REPLICA, False, (turned,)) == ("b", 2)
    assert axis_of(DEVICE, False, (turned,)) == ("a", 4)
    # The first mesh that matches names the axis.
    other = MeshAxes((("x", 4), ("y", 2)), tuple(range(8)))
    assert axis_of(((0, 1), (2, 3), (4, 5), (6, 7)), False, (MESH, other)) == ("y", 2)
    assert axis_of(ALL, False, (other, MESH)) == ("x,y", 8)
    assert axis_of((), False, ()) == ("?", 0)
