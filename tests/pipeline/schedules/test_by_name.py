"""Kinds by name, and the sizes that each refuses."""

import numpy as np
import pytest

import jaxslowmo as js


def test_a_kind_by_its_name():
    assert js.schedules.by_name("gpipe", 2, 3) == js.schedules.gpipe(2, 3)
    made = js.schedules.by_name("interleaved", 2, 4, 2, warm_up="all")
    assert made == js.schedules.interleaved(2, 4, 2, warm_up="all")
    assert js.schedules.by_name("gpipe", np.int64(2), np.int32(3)) == js.schedules.gpipe(2, 3)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            "pipedream",
            {},
            "unknown kind of schedule 'pipedream'; the kinds are gpipe, one_f_one_b, inter",
        ),
        (
            "gpipe",
            {"memory": 2},
            "gpipe has no option `memory`; it has `num_chunks`, `forward_only`",
        ),
        ("gpipe", {"num_stages": 0}, "`num_stages` must be an int >= 1, got 0"),
        ("gpipe", {"num_microbatches": 2.0}, "`num_microbatches` must be an int >= 1, got 2.0"),
        ("gpipe", {"num_chunks": True}, "`num_chunks` must be an int >= 1, got True"),
        (
            "one_f_one_b",
            {"num_chunks": 2},
            "one_f_one_b: `num_chunks` must be 1, got 2; use 'inter",
        ),
        ("zero_bubble", {"num_chunks": 2}, "zero_bubble: `num_chunks` must be 1, got 2; use 'zbv'"),
        ("zero_bubble", {"memory": True}, r"`memory` must be 1 .* got True"),
        ("zero_bubble", {"memory": 3}, r"`memory` must be 1 \(ZB-H1\) or 2 \(ZB-H2\), got 3"),
        ("interleaved", {"num_microbatches": 6}, r"multiple of `num_stages` \(4\), got 6"),
        ("interleaved", {"warm_up": "some"}, '`warm_up` must be "few" or "all", got \'some\''),
    ],
)
def test_what_kinds_refuse(kind, options, message):
    sizes = {"num_stages": 4, "num_microbatches": 8}
    with pytest.raises(ValueError, match=message):
        js.schedules.by_name(kind, **sizes | options)
