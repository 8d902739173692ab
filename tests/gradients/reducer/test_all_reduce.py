"""Tests of the arguments that `all_reduce_gradients` refuses; see also `test_reduce_buckets.py`."""

import jax.numpy as jnp
import pytest

import jaxslowmo as js
from support.bad_input import one_update, trace

PARAMS = {"b": jnp.ones((4, 2)), "half": jnp.ones((4, 3), jnp.bfloat16), "w": jnp.ones((4, 3, 2))}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "up"}, "`order` must be .* leaf positions or names, got 'up'"),
        ({"order": 3}, "`order` must be .* leaf positions or names, got 3"),
        ({"order": "ready"}, r'make_train_step\(order="ready"\), or pass order=js\.ready_order'),
        ({"max_buckets": 0}, "`max_buckets` must be an int >= 1, got 0"),
        ({"alone_bytes": -4}, "`alone_bytes` .* >= 0, got -4"),
        ({"alone_bytes": 4, "split_large": True}, "not with `split_large`"),
        ({"divide_by": "all"}, '`divide_by` must be "initial" or "active", got \'all\''),
        ({"hook": js.hooks.mean}, r"`hook` must be a js\.hooks\.CommHook, .* got mean"),
        ({"hook": "int8"}, r"`hook` must be a js\.hooks\.CommHook, .* got str"),
        ({"bucket_bytes": -1}, "`bucket_bytes` .* >= 0, got -1"),
    ],
)
def test_bad_arguments_are_refused_at_construction(options, message):
    with pytest.raises(ValueError, match=f"all_reduce_gradients: .*{message}"):
        js.all_reduce_gradients("replica", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": ["b", "w", "x"]}, r"`order` names leaf 'x', .*\(3 leaves: b, half, w\)"),
        ({"order": [0, 1, 3]}, "`order` names leaf 3"),
        ({"order": ["b", "w"]}, r"`order` must name every gradient once: missing \['half'\]"),
        ({"order": [0, 1, 2, "w"]}, r"more than once \['w'\]"),
        ({"buckets": [["b"], ["w"]]}, r"`buckets` must hold .*: missing \[1\]"),
        ({"buckets": [["b"], ["w", "half"], ["b"]]}, r"more than once \[0\]"),
        ({"buckets": [["b", "half"], ["w"]]}, r"one dtype, got \['bfloat16', 'float32'\]"),
        ({"buckets": [["b", "w"], [], ["half"]]}, "must not hold an empty bucket"),
        ({"buckets": [["b", "nobody"]]}, "`buckets` names leaf 'nobody'"),
        ({"max_buckets": 1}, "`max_buckets` must be at least 2 here"),
    ],
)
def test_names_and_buckets_that_do_not_fit_are_refused_at_trace_time(options, message):
    with pytest.raises(ValueError, match=message):
        trace(one_update(js.all_reduce_gradients("replica", **options)), PARAMS)
