"""What a hook is given."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxslowmo as js
from support.bad_input import one_update, trace


def test_a_hook_sees_what_is_in_its_bucket():
    seen = []

    def look(bucket):
        seen.append(bucket)
        # What stands behind the last gradient is left out.
        parts = bucket.split(jnp.concatenate([bucket.flat, jnp.zeros(5, bucket.dtype)]))
        assert [x.shape for x in parts] == [piece.part_shape for piece in bucket.pieces]
        return jax.lax.pmean(bucket.flat, bucket.axis_name)

    grads = {
        "a": np.ones((4, 40, 50), np.float32),
        "b": np.ones((4, 3), np.float32),
        "c": np.ones((4, 2), np.float16),
    }
    layout = {"bucket_bytes": 4096, "first_bucket_bytes": 12, "split_large": True}
    tx = js.all_reduce_gradients("replica", hook=js.hooks.stateless(look), **layout)
    trace(one_update(tx), grads)
    named = [[(p.name, p.start, p.stop, p.is_whole) for p in b.pieces] for b in seen]
    assert named == [
        [("b", 0, 3, True)],
        [("a", 0, 1024, False)],
        [("c", 0, 2, True)],  # left over, like the next; float16 was seen first
        [("a", 1024, 2000, False)],
    ]
    assert [b.index for b in seen] == [0, 1, 2, 3]
    assert [b.is_last for b in seen] == [False, False, False, True]
    assert [b.dtype.name for b in seen] == ["float32", "float32", "float16", "float32"]
    assert [p.part_shape for b in seen for p in b.pieces] == [(3,), (1024,), (2,), (976,)]
