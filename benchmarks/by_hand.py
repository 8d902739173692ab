"""An exchange without the package, which others are compared with."""

import jax

import jaxslowmo as js


def averaged_by_hand(axis: str) -> js.ParameterTransform:
    """Return parameters averaged in every step, as one would write it by one buffer and its slices.

    Communication: one all-reduce over `axis`.
    """

    def average(
        carry: js.spec.Carry, replicas: js.spec.ReplicaGroup, context: js.spec.UpdateContext
    ) -> js.spec.Carry:
        del replicas, context
        leaves, treedef = jax.tree.flatten(carry.params)
        flat = jax.lax.concatenate([jax.lax.reshape(x, (x.size,)) for x in leaves], 0)
        mean = jax.lax.psum(flat, axis) / jax.lax.axis_size(axis)
        parts = jax.lax.split(mean, [x.size for x in leaves])
        means = map(jax.lax.reshape, parts, [x.shape for x in leaves])
        return carry._replace(params=treedef.unflatten(means))

    event = js.spec.Event("average", js.every(1), average, replaces=True)
    return js.ParameterTransform(js.Algorithm((event,), owner="by hand"), axis)
