"""Every optimizer, transform and wrapper of optax, made as one would use it, and what to know."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

contrib = optax.contrib
MODULES = {"optax": optax, "optax.contrib": contrib}
# Their annotations do not say that they make transforms.
UNANNOTATED = {
    "MultiSteps", "dog", "dowg", "hutchinson_estimator_diag_hessian", "monitor",
    "scale_by_factored_rms",
}  # fmt: skip


class Case(NamedTuple):
    """A name of optax.

    Attributes:
      make: an optimizer with it.
      note: what to know of it under `sync=`, where it works as it is; "" for nothing.
      condition: on what it works.
      refused: what the error says where it does not work in a training step.
      fast_and_slow: whether the parameters are an `optax.LookaheadParams`.
      is_search: whether it goes as far as the loss falls, so that it must not fall for ever.
    """

    make: Callable[[], Any]
    note: str = ""
    condition: str = ""
    refused: str = ""
    fast_and_slow: bool = False
    is_search: bool = False


def names_of(module: str) -> list[str]:
    """Public names of what makes transforms."""

    def makes_one(name: str, x: Any) -> bool:
        if name in UNANNOTATED:
            return True
        if inspect.isclass(x) or not callable(x) or name.startswith("_"):
            return False
        try:
            return "GradientTransformation" in str(inspect.signature(x).return_annotation)
        except (TypeError, ValueError):
            return False

    found = vars(MODULES[module])
    return sorted(name for name, x in found.items() if makes_one(name, x))


def _scaled(make: Callable[[], Any]) -> Callable[[], Any]:
    """A transform that only scales gradients, with a rate behind it."""
    return lambda: optax.chain(make(), optax.scale(-0.1))


def _before(make: Callable[[], Any]) -> Callable[[], Any]:
    """One that stands before the optimizer."""
    return lambda: optax.chain(make(), optax.sgd(0.1, momentum=0.9))


def _behind(make: Callable[[], Any]) -> Callable[[], Any]:
    """One that stands behind it."""
    return lambda: optax.chain(optax.sgd(0.1, momentum=0.9), make())


def _with_objective(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """What wants the loss as `obj_fn`."""

    def update(updates: Any, state: Any, params: Any = None, *, value_fn: Any, **extra: Any) -> Any:
        del extra
        return tx.update(updates, state, params, obj_fn=value_fn)  # pyright: ignore

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _adam() -> optax.GradientTransformation:
    return optax.adam(0.1)


def _sam() -> optax.GradientTransformation:
    adversary = optax.chain(contrib.normalize(), optax.sgd(0.05))
    return contrib.sam(optax.sgd(0.1), adversary, sync_period=2)


def _labels(params: Any) -> Any:
    return {name: name for name in params}


def _muon() -> optax.GradientTransformation:
    """Muon for the matrix, as `optax.contrib.muon` does."""

    def dimensions(params: Any) -> Any:
        return {
            name: x if isinstance(x, optax.MaskedNode) else contrib.MuonDimensionNumbers()
            for name, x in params.items()
        }

    scaled = _scaled(lambda: contrib.scale_by_muon(weight_dimension_numbers=dimensions))
    return optax.partition({"b": _adam(), "w": scaled()}, _labels)


MOVES = "its [copy of the parameters](#optimizers-that-remember-parameters) moves along"
DISTANCE = "works, with a rate per replica; measures how far exchanges moved parameters, too"
VALUE = "works, with a rate per replica, from its own loss"
SEARCH = "searches on the replica's own batch; refused with averaged gradients or inner axes"
NOISE = "its key is the same on all replicas, so all draw the same noise"
PER_EXAMPLE = "refused: needs a gradient per example"
OBJECTIVE = "reads the loss as `obj_fn`: wrap its update, which gets `value_fn`"
AROUND = "around the optimizer, never around an exchange"
FROZEN = "works; frozen leaves stay equal, and are exchanged with the others"
EVALUATE = f"{MOVES}; [evaluate at another point](#schedule-free)"

_RATES = [
    *["adabelief", "adadelta", "adagrad", "adam", "adamax", "adamaxw", "adamw", "adan"],
    *["amsgrad", "fromage", "lamb", "lars", "lion", "nadam", "nadamw", "novograd", "radam"],
    *["optimistic_adam_v2", "optimistic_gradient_descent", "rmsprop", "rprop", "sgd", "sign_sgd"],
    *["signum", "sm3", "yogi"],
]
# What needs no care stands before, behind or around an optimizer, and is not measured.
_PLAIN = """adafactor adaptive_grad_clip add_decayed_weights apply_every centralize chain clip
    clip_by_block_rms clip_by_global_norm conditionally_mask conditionally_transform ema identity
    inject_stateful_hyperparams masked monitor multi_transform named_chain normalize
    normalize_by_update_norm optimistic_adam partition scale set_to_zero snapshot stateless
    stateless_with_tree_map trace with_extra_args_support zero_nans"""
_SCALES = """acprop adadelta adam adamax adan ademamix adopt amsgrad belief factored_rms galore
    lbfgs learning_rate lion novograd optimistic_gradient param_block_norm param_block_rms radam rms
    rprop rss schedule sign simplified_ademamix sm3 stddev trust_ratio yogi"""
PLAIN = {*_PLAIN.split(), *(f"scale_by_{name}" for name in _SCALES.split())}

OPTAX: dict[str, Case] = {
    **{name: Case(lambda name=name: getattr(optax, name)(0.1)) for name in _RATES},
    "MultiSteps": Case(
        lambda: optax.MultiSteps(_adam(), 2).gradient_transformation(),
        condition="around the optimizer; [`sync_every` counts its calls](#optaxmultisteps)",
    ),
    "add_noise": Case(_before(lambda: optax.add_noise(0.01, 0.55, 0)), condition=NOISE),
    "apply_if_finite": Case(lambda: optax.apply_if_finite(_adam(), 3), condition=AROUND),
    "flatten": Case(
        lambda: optax.flatten(_adam()),
        condition="refused around an optimizer whose copy of the parameters moves along",
    ),
    "freeze": Case(lambda: optax.chain(_adam(), optax.freeze({"b": True, "w": False})), FROZEN),
    "inject_hyperparams": Case(
        lambda: optax.inject_hyperparams(optax.adam)(0.1),
        "works; [set them between steps](#a-rate-set-from-outside) with `js.set_hyperparams`",
    ),
    "keep_params_nonnegative": Case(
        _behind(optax.keep_params_nonnegative),
        condition="steps of `slowmo` and `diloco` can change the sign, until the next update",
    ),
    "lbfgs": Case(lambda: optax.lbfgs(), condition=SEARCH, is_search=True),
    "lookahead": Case(
        lambda: optax.chain(
            optax.stateless(lambda grads, params: grads.fast),
            optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5),
        ),
        condition="train `optax.LookaheadParams.init_synced(params)` by the loss of its `fast`; "
        "`optax.stateless(lambda grads, params: grads.fast)` comes before it; twice the bytes",
        fast_and_slow=True,
    ),
    "measure_with_ema": Case(
        _behind(lambda: optax.monitor({"norm": optax.measure_with_ema(optax.tree.norm, 0.9)})),
        condition="inside of `monitor`",
    ),
    "noisy_sgd": Case(lambda: optax.noisy_sgd(0.1), condition=NOISE),
    "polyak_sgd": Case(lambda: optax.polyak_sgd(), VALUE),
    "scale_by_backtracking_linesearch": Case(
        lambda: optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(4)),
        condition=SEARCH,
        is_search=True,
    ),
    "scale_by_distance_over_gradients": Case(
        _scaled(lambda: optax.scale_by_distance_over_gradients(1e-2)), DISTANCE
    ),
    "scale_by_polyak": Case(_scaled(lambda: optax.scale_by_polyak()), VALUE),
    "scale_by_zoom_linesearch": Case(
        lambda: optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(4)),
        condition=SEARCH,
        is_search=True,
    ),
    "selective_transform": Case(
        lambda: optax.selective_transform(_adam(), freeze_mask={"b": True, "w": False}),
        FROZEN,
    ),
}

CONTRIB: dict[str, Case] = {
    **{
        name: Case(lambda name=name: getattr(contrib, name)(0.1))
        for name in ["acprop", "ademamix", "adopt", "galore", "muon", "simplified_ademamix"]
    },
    "cocob": Case(lambda: contrib.cocob(), condition=MOVES),
    "dadapt_adamw": Case(
        lambda: contrib.dadapt_adamw(estim_lr0=1e-2), "works, with a rate per replica"
    ),
    "differentially_private_aggregate": Case(
        _before(lambda: contrib.differentially_private_aggregate(1.0, 0.1, 0)),
        condition=PER_EXAMPLE,
        refused="have a batch dimension in",
    ),
    "dog": Case(lambda: contrib.dog(init_step=("distance", 1e-2)), DISTANCE),
    "dowg": Case(lambda: contrib.dowg(), DISTANCE),
    "dpsgd": Case(
        lambda: contrib.dpsgd(0.1, 1.0, 0.1, 0),
        condition=PER_EXAMPLE,
        refused="have a batch dimension in",
    ),
    "hutchinson_estimator_diag_hessian": Case(
        lambda: _with_objective(_scaled(contrib.hutchinson_estimator_diag_hessian)()),
        condition=OBJECTIVE,
    ),
    "madgrad": Case(lambda: contrib.madgrad(0.1), condition=MOVES),
    "mechanize": Case(
        lambda: contrib.mechanize(optax.sgd(0.1), s_init=0.1),
        "works, with a scale per replica; scales what exchanges moved, too",
    ),
    "momo": Case(lambda: contrib.momo(0.1), VALUE),
    "momo_adam": Case(lambda: contrib.momo_adam(0.1), VALUE),
    "prodigy": Case(lambda: contrib.prodigy(estim_lr0=1e-2), DISTANCE),
    "reduce_on_plateau": Case(
        lambda: optax.chain(optax.sgd(0.1), contrib.reduce_on_plateau()),
        f"{VALUE}; for one rate [decide on the host](#lower-the-rate-on-a-plateau)",
    ),
    "sam": Case(
        _sam,
        condition=f"{MOVES}; `sync_every` must be a multiple of `sync_period`; no `opaque_mode`",
    ),
    "scale_by_cocob": Case(lambda: contrib.scale_by_cocob(), condition=MOVES),
    "scale_by_madgrad": Case(lambda: contrib.scale_by_madgrad(0.1), condition=MOVES),
    "scale_by_muon": Case(
        _muon,
        condition="for matrices alone: other leaves by `optax.partition`, as in `muon`",
    ),
    "schedule_free": Case(lambda: contrib.schedule_free(optax.sgd(0.1), 0.1), condition=EVALUATE),
    "schedule_free_adamw": Case(lambda: contrib.schedule_free_adamw(0.1), condition=EVALUATE),
    "schedule_free_sgd": Case(lambda: contrib.schedule_free_sgd(0.1), condition=EVALUATE),
    "sophia": Case(lambda: _with_objective(contrib.sophia(0.1)), condition=OBJECTIVE),
    "split_real_and_imaginary": Case(
        lambda: contrib.split_real_and_imaginary(_adam()),
        condition="changes nothing: complex leaves are refused",
    ),
}

CASES = {"optax": OPTAX, "optax.contrib": CONTRIB}


def parameters(case: Case) -> Any:
    """On which a case is measured."""
    params = {"b": jnp.linspace(-0.5, 0.5, 4), "w": jnp.linspace(-1.0, 1.0, 20).reshape(5, 4)}
    return optax.LookaheadParams.init_synced(params) if case.fast_and_slow else params
