"""A model of layers, and any run of them as a stage of a pipeline."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._typing import PyTree
from ...mesh import match_varying
from ._keyed import Keyed, takes_key
from ._runs import Run
from ._ties import TiedLeaf, Ties, as_one, as_ties, check_ties

Layer = Callable[..., PyTree]
Loss = jax.Array | tuple[jax.Array, dict[str, jax.Array]]
"""() loss, or (loss, metrics)."""


class LayeredModel:
    """A model as a list of layers, which may be cut into stages between any two of them.

        model = js.LayeredModel([embed, block, block, head], loss)
        loss = model([embed_params, block_params, block_params, head_params], batch)

    Args:
      layers: functions `layer(params, x) -> x`, one per layer; the first is given the microbatch,
        the last gives what `loss` wants. One that takes a keyword `key` is given a PRNG key of its
        own per microbatch, or None where there are none.
      loss: `loss(output, microbatch)` gives a scalar, or (scalar, dict of scalar metrics): means
        over the examples of the microbatch. Metrics have no gradient.
      tied: groups of leaves that are one parameter, each as (layer, path in its parameters):
        `[((0, "table"), (9, "table"))]`. The first of a group gives the value of all, and the
        gradient of each is the sum over its group, so that any optimizer that works leaf by leaf
        keeps them equal.

    Raises:
      ValueError: no layers, a layer or a loss that is no function, ties that name no leaf.

    Communication: none.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        loss: Callable[[Any, Any], Any],
        *,
        tied: Iterable[Iterable[TiedLeaf]] = (),
    ) -> None:
        if not isinstance(layers, Iterable):
            raise ValueError(
                f"`layers` must be a sequence of functions, got {type(layers).__name__}."
            )
        self.layers: tuple[Layer, ...] = tuple(layers)
        self.loss = loss
        if not self.layers:
            raise ValueError("`layers` must hold at least one function, got none.")
        for i, layer in enumerate(self.layers):
            if not callable(layer):
                raise ValueError(
                    f"`layers` must be functions of (params, x), got {type(layer).__name__} as "
                    f"layer {i}."
                )
        if not callable(loss):
            raise ValueError(
                f"`loss` must be a function of (output, microbatch), got {type(loss).__name__}."
            )
        self.tied: Ties = as_ties(tied, len(self.layers))
        self._takes_key = tuple(map(takes_key, self.layers))
        self.takes_key = any(self._takes_key)

    def __call__(self, params: Sequence[PyTree], batch: PyTree, *, rng: Any = None) -> Loss:
        """The loss of the whole model, without a pipeline.

        Args:
          params: one tree per layer.
          batch: all examples at once.
          rng: the key that the layers of this batch draw from; None: there is none.

        Returns:
          What `loss` returns.
        """
        self.check_params(params)
        microbatch = batch if rng is None else Keyed(batch, rng)
        return self.stage(0, len(self.layers))(tuple(as_one(self.tied, params)), None, microbatch)

    def stage(
        self, start: int, end: int, runs: Sequence[Run] | None = None
    ) -> Callable[[Sequence[PyTree], PyTree, PyTree], Any]:
        """Layers `start` to `end`, without `end`, as a function of (weights, x, microbatch).

        Args:
          start: at 0 it takes no `x` (None) and begins with the microbatch.
          end: at the number of layers it includes the loss, and returns what that returns.
          runs: the same layers, those that are computed alike as one; weights are then one tree
            per run, stacked where it has several layers. None: each layer stands alone.

        Raises:
          ValueError: at call, a loss that is no scalar, or metrics that are no dict of scalars.
        """
        is_first, is_last = start == 0, end == len(self.layers)
        every = [Run(i, 1) for i in range(start, end)] if runs is None else runs

        def compute(weights: Sequence[PyTree], x: PyTree, microbatch: PyTree) -> Any:
            keyed = microbatch if isinstance(microbatch, Keyed) else None
            examples = microbatch if keyed is None else keyed.batch
            if is_first:
                x = examples
            for run, own in zip(every, weights, strict=True):
                x = self._run(run, own, x, keyed)
            return _checked_loss(self.loss(x, examples)) if is_last else x

        return compute

    def _run(self, run: Run, weights: PyTree, x: PyTree, keyed: Keyed | None) -> PyTree:
        """What the layers of a run make of `x`."""

        def layer(x: PyTree, own: PyTree, index: Any) -> PyTree:
            if not self._takes_key[run.start]:
                return self.layers[run.start](own, x)
            key = None if keyed is None else keyed.layer_key(index)
            return self.layers[run.start](own, x, key=key)

        if run.count == 1:
            return layer(x, weights, run.start)
        first = jax.tree.map(lambda w: w[0], weights)
        kind = jax.eval_shape(layer, x, first, run.start)
        if _types_of(kind) != _types_of(x):
            # What a loop carries has one type: these layers change that of what they are given.
            for i in range(run.count):
                x = layer(x, jax.tree.map(lambda w, i=i: w[i], weights), run.start + i)
            return x

        def step(x: PyTree, now: tuple[PyTree, jax.Array]) -> tuple[PyTree, None]:
            return match_varying(layer(x, *now), x), None

        numbers = run.start + jnp.arange(run.count)
        return lax.scan(step, x, (weights, numbers))[0]

    def as_one(self, params: Sequence[PyTree]) -> list[PyTree]:
        """`params` with tied leaves replaced by the first of their group."""
        return as_one(self.tied, params, differentiable=False)

    def check_params(self, params: Sequence[PyTree]) -> None:
        """Raise `ValueError` unless `params` has a tree per layer, with the tied leaves."""
        if not isinstance(params, Sequence) or len(params) != len(self.layers):
            got = len(params) if isinstance(params, Sequence) else type(params).__name__
            raise ValueError(
                f"`params` must be a sequence of one tree per layer, {len(self.layers)} of them, "
                f"got {got}."
            )
        check_ties(self.tied, params)


def _types_of(tree: PyTree) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(jnp.shape(x), jnp.result_type(x)) for x in leaves]


def _checked_loss(value: Any) -> Any:
    loss, metrics = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
    is_fine = isinstance(metrics, dict) and all(
        jnp.shape(x) == () for x in (loss, *metrics.values()) if not isinstance(x, tuple)
    )
    if not is_fine or isinstance(loss, tuple):
        raise ValueError(
            "`loss` must return a scalar, or (scalar, dict of scalar metrics), got "
            f"{jax.tree.map(jnp.shape, value)}."
        )
    return value
