"""A model of layers, and any run of them as a stage of a pipeline.

In the order of this file: the model; which keywords layers take; the terms of a loss.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from ..._support.types import PyTree
from ...tracing import LossProgram, Quotient, check_loss, warn_of_weight
from ...tree import leaf_names, promoted_dtype
from ._microbatches import KeyedMicrobatch
from ._ties import Groups, TiedLeaf, Ties, as_ties, tie_leaves, tied_positions, tied_transform

# Shorter runs of equal layers are unrolled: the compiler does not fuse across the border of a loop.
_SHORTEST = 4

Layer = Callable[..., PyTree]

KEYWORDS = ("key", "state")
"""The arguments that a layer may take besides its parameters and its input."""

Takes = Collection[str] | Sequence[Collection[str] | None] | None
"""Names out of `KEYWORDS`: for all layers, or for each; None: those in the layer's signature."""


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
            kind = type(layers).__name__
            raise ValueError(f"`layers` must be a sequence of functions, got {kind}.")
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
        self._has_checked_weight = False  # which traces the loss once more

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
        loss, state = self._compute_loss(params, batch, rng, model_state)
        return loss.to_output(state, as_quotient=False)

    def quotient_loss(
        self, params: Sequence[PyTree], batch: PyTree, *, rng: Any = None, model_state: Any = None
    ) -> Any:
        """Compute the loss as the call does; a quotient of sums is a `tracing.Quotient`."""
        loss, state = self._compute_loss(params, batch, rng, model_state)
        return loss.to_output(state, as_quotient=True)

    def _compute_loss(
        self, params: Sequence[PyTree], batch: PyTree, rng: Any, model_state: Any
    ) -> tuple["Loss", PyTree]:
        """Return the loss and the new model state; None for models without."""
        # `check_params` is too strict: leaves may be functions, as in an equinox module.
        self._check_count(params)
        microbatch = batch if rng is None else KeyedMicrobatch(batch, rng)
        whole = self.stage(0, len(self.layers))
        weights = tuple(tie_leaves(self.tied_positions(params), params))
        x = None
        if self.takes_state:
            x = WithState(None, self.checked_state(model_state))
        elif jax.tree.leaves(model_state):
            raise ValueError("`model_state` must be left out, since no layer takes `state`.")
        terms = whole(weights, x, microbatch)
        return terms.loss(1), terms.state

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
            keyed = microbatch if isinstance(microbatch, KeyedMicrobatch) else None
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
                terms = self._loss_terms(x, examples)
                return terms._replace(state=after) if self.takes_state else terms
            return WithState(x, after) if self.takes_state else x

        return compute

    def _loss_terms(self, output: PyTree, examples: PyTree) -> "LossTerms":
        """Return the terms of the loss of a microbatch; warn of a weight that is a metric."""
        terms = loss_terms(self.loss(output, examples))
        if terms.weight is not None and not self._has_checked_weight:
            self._has_checked_weight = True
            weight = lambda output: loss_terms(self.loss(output, examples)).weight  # noqa: E731
            warn_of_weight("loss", weight, output)
        return terms

    def _run(
        self,
        run: Run,
        weights: PyTree,
        x: PyTree,
        state: PyTree,
        keyed: KeyedMicrobatch | None,
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
            result = self.layers[first](params, x, **options, state=state)
            if not isinstance(result, tuple) or len(result) != 2:
                raise ValueError(
                    f"`layers`: layer {first} takes `state` and must return (x, new state), got "
                    f"{jax.tree.map(jnp.shape, result)}."
                )
            return result

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
                f"`model_state` must be a list of {len(self.layers)} trees, one per layer, {{}} "
                f"without state, got {got!r}."
            )
        check_leaves("model_state", model_state, keys=True)
        return list(model_state)

    def tied_positions(self, params: Sequence[PyTree]) -> Groups:
        """Return the positions of tied leaves; raise `ValueError` unless `params` has them."""
        return tied_positions(self.tied, params) if self.tied else ()

    def tie_params(self, params: Sequence[PyTree]) -> list[PyTree]:
        """Return `params` with tied leaves replaced by the first of their group."""
        return tie_leaves(self.tied_positions(params), params, differentiable=False)

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
            count = len(self.layers)
            raise ValueError(f"`params` must be {count} trees, one per layer, got {got}.")


def _types_of(tree: PyTree) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(jnp.shape(x), jnp.result_type(x)) for x in leaves]


# What layers take.


def takes_of(layers: Sequence[Any], takes: Takes) -> tuple[tuple[str, ...], ...]:
    """Return the keywords that each layer is called with.

    Raises:
      ValueError: `takes` of another form; a layer that cannot be called so.
    """
    each: Any = [takes] * len(layers) if takes is None or _are_names(takes) else takes
    is_form = isinstance(each, list | tuple) and len(each) == len(layers)
    if not is_form or not all(x is None or _are_names(x) for x in each):
        raise ValueError(
            "`takes` must be names of 'key' and 'state', such as ('key',), or a list of such names "
            f"or None for each of {len(layers)} layers, got {takes!r}."
        )
    return tuple(_layer_keywords(i, *one) for i, one in enumerate(zip(layers, each, strict=True)))


def _are_names(x: Any) -> bool:
    is_collection = isinstance(x, list | tuple | set | frozenset)
    return is_collection and all(isinstance(name, str) and name in KEYWORDS for name in x)


def _layer_keywords(index: int, layer: Any, said: Collection[str] | None) -> tuple[str, ...]:
    """Return the keywords of layer `index`: those in `said`; None: those that its signature has."""
    if not callable(layer):
        raise ValueError(
            f"`layers` must be functions of (params, x), got {type(layer).__name__} as layer "
            f"{index}."
        )
    try:
        signature = inspect.signature(layer)
    except (TypeError, ValueError):  # builtins have no signature, and take no such keywords
        return tuple(name for name in KEYWORDS if name in (said or ()))
    has = _names_in(signature, layer) if said is None else said
    taken = tuple(name for name in KEYWORDS if name in has)
    try:
        signature.bind(None, None, **dict.fromkeys(taken))
    except TypeError as error:
        call = ", ".join(["params", "x", *(f"{name}={name}" for name in taken)])
        name = getattr(layer, "__name__", type(layer).__name__)
        raise ValueError(
            f"`{'layers' if said is None else 'takes'}`: layer {index}, {name!r}, can't be called "
            f"as layer({call}): {error}."
        ) from None
    return taken


def _names_in(signature: inspect.Signature, layer: Any) -> list[str]:
    """Return the names of parameters behind the first two that `functools.partial` hasn't bound."""
    bound = layer.keywords if isinstance(layer, functools.partial) else {}
    every = signature.parameters.values()
    positional = [p.name for p in every if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [p.name for p in every if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [name for name in named if name not in (*positional[:2], *bound)]


def check_leaves(argument: str, tree: PyTree, *, keys: bool = False) -> None:
    """Raise `ValueError` for a leaf that is not an array, a number or the type of an array.

    Args:
      argument: the name of the public argument, for the message.
      tree: the value of the argument.
      keys: whether leaves may also be PRNG keys.
    """
    leaves = zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)
    wrong = [(n, x) for n, x in leaves if not (_is_number(x) or (keys and _is_key(x)))]
    if wrong:
        raise ValueError(
            f"`{argument}` must hold arrays of numbers (pass a PRNG key as `rng`), got "
            f"{', '.join(f'{_kind(x)} at {name!r}' for name, x in wrong)}."
        )


def _is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _is_number(x: Any) -> bool:
    """Return whether `x` is a number, an array of numbers or booleans, or the type of one."""
    if isinstance(x, bool | int | float | complex):
        return True
    dtype = getattr(x, "dtype", None)
    return dtype == np.dtype(bool) or (dtype is not None and jnp.issubdtype(dtype, np.number))


# Losses.


Metrics = dict[str, jax.Array]


class Loss(NamedTuple):
    """The loss of a batch, and its metrics.

    Attributes:
      value: () the loss.
      weight: () the sum of the weights of all examples; None where the loss is a mean over them.
      metrics: maps names to scalars; None if the loss function returns none.
    """

    value: jax.Array
    weight: jax.Array | None
    metrics: Metrics | None

    def to_output(self, state: PyTree = None, *, as_quotient: bool) -> Any:
        """Return what a loss function returns: loss, (loss, metrics) or (loss, (metrics, state)).

        Args:
          state: the new model state; None for models without.
          as_quotient: whether a loss with a weight is returned as a `Quotient`.
        """
        loss: Any = self.value
        if as_quotient and self.weight is not None:
            loss = Quotient(self.value, self.weight)
        if state is not None:
            return loss, (self.metrics or {}, state)
        return loss if self.metrics is None else (loss, self.metrics)


class LossTerms(NamedTuple):
    """The terms of the loss of a microbatch, or their sums over several.

    Attributes:
      total: () the loss, or with a weight the sum that is divided by the weight.
      weight: () the weight; None where the loss is a mean over the examples of a microbatch.
      metrics: maps a name to a mean or to a pair (sum, weight); None if the loss has no metrics.
      state: model state of the last stage's layers for the next microbatch; None without any.
    """

    total: jax.Array
    weight: jax.Array | None
    metrics: dict[str, Any] | None
    state: PyTree = None

    def with_weights(self, fn: Callable[[jax.Array], jax.Array]) -> "LossTerms":
        """Return the terms with `fn` applied to every weight."""
        weight = None if self.weight is None else fn(self.weight)
        metrics = self.metrics and {
            n: (x[0], fn(x[1])) if isinstance(x, tuple) else x for n, x in self.metrics.items()
        }
        return self._replace(weight=weight, metrics=metrics)

    def loss(self, count: Any) -> Loss:
        """Return the loss of all examples, from sums over `count` microbatches; 0 for weight 0."""
        value = self.total / count if self.weight is None else quotient(self.total, self.weight)
        metrics = self.metrics and {name: _mean(x, count) for name, x in self.metrics.items()}
        return Loss(value, self.weight, metrics)


def quotient(total: jax.Array, weight: jax.Array) -> jax.Array:
    """Return `total / weight`, and 0 for weight 0, such as if all examples are masked."""
    one = jnp.ones_like(weight)
    share = jnp.where(weight == 0, 0 * one, one / jnp.where(weight == 0, one, weight))
    return total * share.astype(total.dtype)


def _mean(x: Any, count: Any) -> jax.Array:
    return quotient(*x) if isinstance(x, tuple) else x / count


def loss_terms(value: Any) -> LossTerms:
    """Return the terms of the value that a loss function has returned.

    Raises:
      ValueError: a value that is not a scalar, a pair (sum, weight), or one of these with a dict
        of metrics of these two forms; a loss, or the sum of one, that is not floating.
    """
    has_metrics = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict)
    loss, metrics = value if has_metrics else (value, None)
    every = [loss, *(metrics or {}).values()]
    if not all(map(_is_scalar_or_pair, every)):
        kinds = jax.tree.map(_kind, value, is_leaf=lambda x: x is None)
        raise ValueError(
            "`loss` must return a scalar or a pair (sum, weight), or one of these and a dict of "
            f"such metrics, got {kinds}."
        )
    check_loss("loss", loss[0] if isinstance(loss, tuple) else loss)
    total, weight = _pair(loss) if isinstance(loss, tuple) else (_floating(loss), None)
    if metrics is not None:
        metrics = {
            n: _pair(x) if isinstance(x, tuple) else _floating(x) for n, x in metrics.items()
        }
    return LossTerms(total, weight, metrics)


def _pair(x: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
    """Return a sum and its weight as floating arrays; each may be a number or an integer count."""
    total, weight = x
    weight = jnp.asarray(weight, promoted_dtype(jnp.result_type(weight), jnp.float32))
    return _floating(total), weight


def _floating(x: Any) -> jax.Array:
    """Return a scalar as an array: of its own dtype if that is inexact, else float32."""
    kind = jnp.result_type(x)
    is_kept = jnp.issubdtype(kind, jnp.inexact) and type(x) is not float
    return jnp.asarray(x, kind if is_kept else jnp.float32)


def _is_scalar_or_pair(x: Any) -> bool:
    parts: tuple[Any, ...] = x if isinstance(x, tuple) and len(x) == 2 else (x,)
    return all(_is_number(x) and np.shape(x) == () for x in parts)


def _kind(x: Any) -> str:
    """Return dtype and shape of an array, or the name of the class of any other object."""
    is_array = hasattr(x, "dtype") and hasattr(x, "shape")
    return f"{x.dtype}{list(x.shape)}" if is_array else type(x).__name__
