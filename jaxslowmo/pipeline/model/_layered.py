"""A model of layers, and any run of them as a stage of a pipeline."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from ..._support.types import PyTree
from ...transform import LossProgram
from ._calls import Keyed, Takes, check_leaves, loss_terms, takes_of
from ._ties import Groups, TiedLeaf, Ties, as_one, as_ties, tied_positions, tied_transform

# Shorter runs of equal layers are unrolled: the compiler does not fuse across the border of a loop.
_SHORTEST = 4

Layer = Callable[..., PyTree]


class Run(NamedTuple):
    """Consecutive layers of the model that a stage computes by one loop.

    Attributes:
      start: index of the first layer.
      count: number of layers; 1 for a layer without a loop.
    """

    start: int
    count: int


class WithState(NamedTuple):
    """Activations, and the state that layers carry from microbatch to microbatch.

    Attributes:
      x: activations; None for the first stage.
      states: one tree per run of layers.
    """

    x: PyTree
    states: list[PyTree]


def without_state(x: PyTree) -> PyTree:
    """Return activations, or their cotangents, without the state of layers."""
    return x.x if isinstance(x, WithState) else x


class LayeredModel(LossProgram):
    """A model as a list of layers, which can be cut into stages between any two layers.

        model = js.LayeredModel([embed, block, block, head], loss)
        loss = model([embed_params, block_params, block_params, head_params], batch)

    Args:
      layers: functions `layer(params, x) -> x`, one per layer. The first gets the microbatch as
        `x`; the last returns the input of `loss`. A layer that takes `key` gets its own PRNG key
        per microbatch, or None without `rng`. A layer that takes `state` gets its part of the model
        state, such as BatchNorm's statistics, and returns (x, new state); no gradient passes
        through the state.
      loss: function `loss(output, microbatch)`. It returns a scalar, the mean over the examples of
        the microbatch, of a real floating dtype (float32 for a Python float); or a pair
        (sum, weight), such as a sum over unmasked tokens and their number: the loss is then sum of
        sums / sum of weights, however examples are divided into microbatches. Either may come with
        a dict of metrics, each a scalar or a pair: `(loss, metrics)`. Metrics have no gradient.
      tied: groups of leaves that are one parameter, each leaf as (layer, path in its parameters):
        `[((0, "table"), (9, "table"))]`. All leaves of a group have the value of the first, and the
        gradient of each is the sum over its group, so that any optimizer that works leaf by leaf
        keeps them equal.
      takes: which of the keywords `key` and `state` layers are called with: `("key",)` for all
        layers, or one such entry for each layer. None, for all or for one: those that the layer's
        signature names, as third or later parameter or keyword-only. `**kwargs` names neither;
        `functools.wraps` gives a wrapper the signature of what it wraps.

    Attributes:
      takes: the keywords of each layer, a tuple of tuples.

    Raises:
      ValueError: no layers, a layer or a loss that is not a function, other names in `takes` or a
        number of entries that is not that of the layers, a layer that cannot be called with two
        positional arguments and these keywords, ties that name no leaf.

    Communication: none.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        loss: Callable[[Any, Any], Any],
        *,
        tied: Iterable[Iterable[TiedLeaf]] = (),
        takes: Takes = None,
    ) -> None:
        if not isinstance(layers, Iterable):
            raise ValueError(
                f"`layers` must be a sequence of functions, got {type(layers).__name__}."
            )
        self.layers: tuple[Layer, ...] = tuple(layers)
        self.loss = loss
        if not self.layers:
            raise ValueError("`layers` must hold at least one function, got none.")
        self.takes = takes_of(self.layers, takes)
        if not callable(loss):
            raise ValueError(
                f"`loss` must be a function of (output, microbatch), got {type(loss).__name__}."
            )
        self.tied: Ties = as_ties(tied, len(self.layers))
        self.takes_key: bool = any("key" in names for names in self.takes)
        self.takes_state: bool = any("state" in names for names in self.takes)

    def __call__(
        self,
        params: Sequence[PyTree],
        batch: PyTree,
        *,
        rng: Any = None,
        model_state: Sequence[PyTree] | None = None,
    ) -> Any:
        """Return the loss of the whole model, computed without a pipeline.

        Args:
          params: one tree per layer.
          batch: all examples at once.
          rng: PRNG key for the layers of this batch; None: layers get no key.
          model_state: one tree per layer, {} for layers without state; only for models whose layers
            take `state`.

        Returns:
          The loss, or (loss, metrics); (loss, (metrics, new model state)) if layers take `state`.

        Raises:
          ValueError: parameters or model state of other layers, or an invalid loss.
        """
        return self._called(params, batch, rng, model_state, weighted=False)

    def weighted(
        self, params: Sequence[PyTree], batch: PyTree, *, rng: Any = None, model_state: Any = None
    ) -> Any:
        """Compute the loss as the call does; a quotient of sums is a `tracing.Quotient`."""
        return self._called(params, batch, rng, model_state, weighted=True)

    def _called(
        self, params: Sequence[PyTree], batch: PyTree, rng: Any, model_state: Any, *, weighted: bool
    ) -> Any:
        # `check_params` is too strict: leaves may be functions, as in an equinox module.
        self._check_count(params)
        microbatch = batch if rng is None else Keyed(batch, rng)
        whole = self.stage(0, len(self.layers))
        weights = tuple(as_one(self.tied_positions(params), params))
        x = None
        if self.takes_state:
            x = WithState(None, self.checked_state(model_state))
        elif jax.tree.leaves(model_state):
            raise ValueError("`model_state` must be left out, since no layer takes `state`.")
        terms = whole(weights, x, microbatch)
        return terms.loss(1).returned(terms.state, weighted=weighted)

    def stage(
        self, start: int, end: int, runs: Sequence[Run] | None = None, *, loops: bool = True
    ) -> Callable[[Sequence[PyTree], PyTree, PyTree], Any]:
        """Return layers `start` to `end`, without `end`, as a function (weights, x, microbatch).

        Args:
          start: the first layer; if 0, `x` must be None, and the first input is the microbatch.
          end: index after the last layer; if it is the number of layers, the function includes the
            loss and returns its `LossTerms`.
          runs: the same layers in runs; weights are then one tree per run, stacked if it has
            several layers. None: each layer is its own run.
          loops: whether a run of several layers is a loop; otherwise its layers are written out.

        Returns:
          A function, which takes and returns `WithState` if layers of the model take `state`.

        Raises:
          ValueError: an invalid loss, when the function is called.
        """
        is_first, is_last = start == 0, end == len(self.layers)
        all_runs = [Run(i, 1) for i in range(start, end)] if runs is None else runs

        def compute(weights: Sequence[PyTree], x: PyTree, microbatch: PyTree) -> Any:
            keyed = microbatch if isinstance(microbatch, Keyed) else None
            examples = microbatch if keyed is None else keyed.batch
            states: Sequence[PyTree] = [None] * len(all_runs)
            if self.takes_state:
                x, states = x.x, lax.stop_gradient(x.states)
            if is_first:
                x = examples
            after = []
            for run, run_weights, state in zip(all_runs, weights, states, strict=True):
                x, new = self._run(run, run_weights, x, state, keyed, loops)
                after.append(lax.stop_gradient(new))
            if is_last:
                terms = loss_terms(self.loss(x, examples))
                return terms._replace(state=after) if self.takes_state else terms
            return WithState(x, after) if self.takes_state else x

        return compute

    def _run(
        self,
        run: Run,
        weights: PyTree,
        x: PyTree,
        state: PyTree,
        keyed: Keyed | None,
        loops: bool,
    ) -> tuple[PyTree, PyTree]:
        """Return the output of the layers of a run, and their new state."""
        first = run.start

        def layer(x: PyTree, params: PyTree, state: PyTree, index: Any) -> tuple[PyTree, PyTree]:
            takes, options = self.takes[first], {}
            if "key" in takes:
                options["key"] = None if keyed is None else keyed.layer_key(index)
            if "state" not in takes:
                return self.layers[first](params, x, **options), state
            return self._with_state(first, self.layers[first](params, x, **options, state=state))

        if run.count == 1:
            return layer(x, weights, state, first)
        one, before = jax.tree.map(lambda w: w[0], (weights, state))
        kind = jax.eval_shape(layer, x, one, before, first)[0]
        # A scan needs a carry of one type, and layers may change the type of their input.
        if not loops or _types_of(kind) != _types_of(x):
            after = []
            for i in range(run.count):
                one, before = jax.tree.map(lambda w, i=i: w[i], (weights, state))
                x, new = layer(x, one, before, first + i)
                after.append(new)
            return x, jax.tree.map(lambda *each: jnp.stack(each), *after)

        def step(x: PyTree, now: tuple[PyTree, PyTree, jax.Array]) -> tuple[PyTree, PyTree]:
            y, new = layer(x, *now)
            return y, new

        return lax.scan(step, x, (weights, state, first + jnp.arange(run.count)))

    def _with_state(self, index: int, result: Any) -> tuple[PyTree, PyTree]:
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(
                f"`layers`: layer {index} takes `state` and must return (x, new state), got "
                f"{jax.tree.map(jnp.shape, result)}."
            )
        return result

    def equal_layers(self, one: int, other: int) -> bool:
        """Return whether two layers are the same function, called with the same keywords."""
        if self.takes[one] != self.takes[other]:
            return False
        a, b = self.layers[one], self.layers[other]
        try:
            return a is b or bool(a == b)
        except Exception:  # some objects compare elementwise, as arrays do
            return False

    def runs(self, kinds: Sequence[Any], start: int, end: int) -> tuple[Run, ...]:
        """Return layers `start` to `end`, without `end`, in runs.

        Args:
          kinds: a description of each layer's parameters: structure, paths, shapes, dtypes, specs.
          start: index of the first layer.
          end: index after the last layer.
        """
        runs: list[Run] = []
        at = start
        while at < end:
            to = at + 1
            while to < end and kinds[to] == kinds[at] and self.equal_layers(at, to):
                to += 1
            whole = to - at >= _SHORTEST
            runs += [Run(at, to - at)] if whole else [Run(i, 1) for i in range(at, to)]
            at = to
        return tuple(runs)

    def checked_state(self, model_state: Any) -> list[PyTree]:
        """Return `model_state` as a list; raise `ValueError` unless it has one tree per layer."""
        if not isinstance(model_state, list | tuple) or len(model_state) != len(self.layers):
            got = len(model_state) if isinstance(model_state, list | tuple) else model_state
            raise ValueError(
                f"`model_state` must be a list of one tree per layer, {len(self.layers)} of them, "
                f"{{}} for layers that take no `state`, got {got!r}."
            )
        check_leaves("model_state", model_state, keys=True)
        return list(model_state)

    def tied_positions(self, params: Sequence[PyTree]) -> Groups:
        """Return the positions of tied leaves; raise `ValueError` unless `params` has them."""
        return tied_positions(self.tied, params) if self.tied else ()

    def as_one(self, params: Sequence[PyTree]) -> list[PyTree]:
        """Return `params` with tied leaves replaced by the first of their group."""
        return as_one(self.tied_positions(params), params, differentiable=False)

    def tied_transform(
        self, tx: optax.GradientTransformation
    ) -> optax.GradientTransformationExtraArgs:
        """Return `tx` for the parameters of all layers, of which tied ones are one parameter.

        `js.make_train_step` does this by itself, also for parameters in stages. For loops of one's
        own: `tx` sees a tied parameter once, as the first leaf of its group, and its update and its
        state are those of all copies. Without tied leaves it is `tx` itself.

        Communication: that of `tx`, for fewer leaves.
        """
        if not self.tied:
            return optax.with_extra_args_support(tx)
        return tied_transform(self.tied_positions, tx)

    def check_params(self, params: Sequence[PyTree]) -> None:
        """Raise `ValueError` unless `params` has a tree of arrays per layer and the tied leaves."""
        self._check_count(params)
        check_leaves("params", params)
        self.tied_positions(params)

    def _check_count(self, params: Any) -> None:
        if not isinstance(params, Sequence) or len(params) != len(self.layers):
            got = len(params) if isinstance(params, Sequence) else type(params).__name__
            raise ValueError(
                f"`params` must be a sequence of one tree per layer, {len(self.layers)} of them, "
                f"got {got}."
            )


def _types_of(tree: PyTree) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(jnp.shape(x), jnp.result_type(x)) for x in leaves]
