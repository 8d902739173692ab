"""The dtype in which a loss computes, apart from that of the parameters."""

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp

from ..._support.types import PyTree
from ...tracing import FullLoss
from ...tree import at_least_float32, cast

COMPUTE_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Policy:
    """In what a loss function computes, whatever dtypes parameters and batch have.

    `js.make_train_step(policy=js.Policy("bfloat16"))` gives the loss function parameters and batch
    in bfloat16. Parameters stay as they are: gradients arrive in their dtypes, and the optimizer
    works on float32 master weights. Results are at least float32. With `"float16"` put
    `js.dynamic_loss_scale` around `optimizer`: without it a step issues a `UserWarning` once.

    Attributes:
      compute: `"float32"`, `"bfloat16"` or `"float16"`: what floating leaves are cast to.
      keep: names of leaves, or of the subtrees that hold them, that are not cast, in the parameters
        as in the batch: paths such as `"decoder/norm"`, or patterns such as `"*/norm"`, in which
        `*` stands for anything. A name that is nowhere is an error of the step.

    Raises:
      ValueError: another dtype, or names that are no strings.
    """

    compute: str = "float32"
    _: KW_ONLY
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise `ValueError` for other dtypes and names."""
        try:
            name = jnp.dtype(self.compute).name
        except TypeError:
            name = None
        if name not in COMPUTE_DTYPES:
            raise ValueError(
                f"Policy: `compute` must be one of {COMPUTE_DTYPES}, got {self.compute!r}."
            )
        names = (self.keep,) if isinstance(self.keep, str) else self.keep
        keep = tuple(names) if isinstance(names, Iterable) else (names,)
        if not all(isinstance(x, str) and x for x in keep):
            raise ValueError(f"Policy: `keep` must be names of leaves, got {self.keep!r}.")
        object.__setattr__(self, "compute", name)
        object.__setattr__(self, "keep", keep)

    def cast(self, tree: PyTree) -> PyTree:
        """`tree` with its real floating leaves in `compute`, but for those that are kept."""
        dtype = jnp.dtype(self.compute)

        def one(path: Any, x: Any) -> Any:
            if not _is_real(x) or any(_matches(path, name) for name in self.keep):
                return x
            return cast(jnp.asarray(x), dtype)

        return jax.tree_util.tree_map_with_path(one, tree)

    def check_names(self, *trees: PyTree) -> None:
        """Raise `ValueError` for names in `keep` that none of the trees has."""
        paths = [path for tree in trees for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        for name in self.keep:
            if not any(_matches(path, name) for path in paths):
                known = ", ".join(_name(path) for path in paths[:8])
                more = f" and {len(paths) - 8} more" if len(paths) > 8 else ""
                raise ValueError(
                    f"Policy: `keep` must name leaves of the parameters or the batch, or subtrees "
                    f"of them, got {name!r}; leaves are {known}{more}."
                )


def computing_in(policy: Policy, loss: FullLoss) -> FullLoss:
    """`loss` that computes as `policy` says.

    Model state goes in as it is, and comes out in the dtypes that it had. Loss and floating metrics
    are at least float32. What else the loss is given is cast as the batch is.
    """

    def full(params: PyTree, batch: PyTree, *, rng: jax.Array, model_state: PyTree, **extra: Any):
        policy.check_names(params, batch, extra)
        value, (metrics, after) = loss(
            policy.cast(params),
            policy.cast(batch),
            rng=rng,
            model_state=model_state,
            **policy.cast(extra),
        )
        value, metrics = jax.tree.map(_wide, (value, metrics))
        if jax.tree.structure(after) == jax.tree.structure(model_state):
            after = jax.tree.map(_as, after, model_state)
        return value, (metrics, after)

    return full


def _matches(path: Any, name: str) -> bool:
    return any(fnmatchcase(_name(path[:n]), name) for n in range(1, len(path) + 1))


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _is_real(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _wide(x: Any) -> Any:
    return cast(jnp.asarray(x), at_least_float32(jnp.result_type(x))) if _is_real(x) else x


def _as(x: Any, old: Any) -> Any:
    return cast(jnp.asarray(x), jnp.result_type(old)) if _is_real(x) else x
