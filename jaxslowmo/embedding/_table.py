"""The description of one embedding table, `js.Table`, and checks of it."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from .._support.checks import checked_int
from .._support.types import PyTree
from ._optimizers import RowwiseOptimizer

OWNER = "embeddings"
MAKERS = "js.embedding.rowwise_adagrad, js.embedding.rowwise_sgd or js.embedding.rowwise_adam"
# Row numbers are int32, and some numbers above the largest row mean that there is no row.
MOST_ROWS = 2**31 - 2**20


@dataclasses.dataclass(frozen=True)
class Table:
    """The description of one embedding table for `js.embeddings`.

    Attributes:
      num_rows: number of rows; ids are 0 to num_rows - 1.
      dim: length of a vector.
      shard: how the devices share the table. `"row"`: each device holds some rows, spread so that
        neighbouring ids are on different devices, since frequent ids are often the small ones.
        `"column"`: each device holds some columns of all rows; the number of devices must divide
        `dim`. `"table"`: one device holds the whole table. Tables of one `dim` and `dtype` are then
        spread over the devices in one array, so that each device has about the same number of rows.
        Every device allocates the rows of the fullest one, so use it for many tables, not for one.
      pooling: how the vectors of a bag are combined. `"sum"`; `"mean"`: their sum divided by the
        number of ids, whatever the weights; None: not combined. A bag without ids gives 0.
      features: names of the inputs that look up this table; None: only the table's name.
      position_weights: name of a leaf of the dense parameters, such as `"towers/position"`, of
        shape (max_length,): the vector at index i of a bag is multiplied by entry i before pooling.
        Or a mapping from features to such names. None: no such weights.
      init: function `init(key, shape, dtype)`, as in `jax.nn.initializers`. It is called for blocks
        of rows, so it must treat all rows alike. None: uniform in +-1/sqrt(num_rows).
      optimizer: optimizer of the rows, `js.embedding.rowwise_adagrad(...)`, `rowwise_sgd(...)` or
        `rowwise_adam(...)`; None: that of `js.embeddings`.
      dtype: dtype in which rows are stored and sent. Updates are computed in float32 and rounded to
        the nearest: in bfloat16 an update below about 1/256 of a weight is lost.
    """

    num_rows: int
    dim: int
    shard: Literal["row", "column", "table"] = "row"
    pooling: Literal["sum", "mean"] | None = "sum"
    features: Sequence[str] | None = None
    position_weights: str | Mapping[str, str] | None = None
    init: Callable[..., jax.Array] | None = None
    dtype: Any = jnp.float32
    optimizer: RowwiseOptimizer | None = None

    def features_of(self, name: str) -> tuple[str, ...]:
        """Return the names of the inputs that look up this table, whose name is `name`."""
        return (name,) if self.features is None else tuple(self.features)

    def position_weights_of(self, feature: str) -> str | None:
        """Return the name of the leaf with the position weights of one input; None for none."""
        named = self.position_weights
        return named.get(feature) if isinstance(named, Mapping) else named


Tables = Mapping[str, Table]
"""A mapping from names to tables."""
Capacity = Mapping[str, int | None]
"""The slots per owner of each table; None means as many as there can be distinct ids."""


class WithTables(NamedTuple):
    """A pair of trees: one for the dense parameters, one for the embedding tables.

    Attributes:
      dense: dense parameters, or the state of their optimizer.
      tables: stored tables, or the state of the optimizers of their rows.
    """

    dense: PyTree
    tables: PyTree


def checked_tables(tables: Any, optimizer: RowwiseOptimizer | None) -> dict[str, Table]:
    """Return `tables` with plain ints, and with `optimizer` where a table has none of its own.

    Raises:
      ValueError: wrong tables, naming the table and the argument.
    """
    items = tables.items() if isinstance(tables, Mapping) else ()
    wrong = {k: x for k, x in items if not (isinstance(k, str) and isinstance(x, Table))}
    if wrong or not items:
        rule = "must map names to js.Table, and not be empty"
        raise ValueError(f"{OWNER}: `tables` {rule}, got {wrong or tables!r}.")
    checked: dict[str, Table] = {}
    users: dict[str, str] = {}
    for name, table in items:
        what, own = f"{OWNER}: table {name!r}:", table.optimizer
        table = checked[name] = dataclasses.replace(
            table,
            num_rows=checked_int(f"{what} `num_rows`", table.num_rows, 1),
            dim=checked_int(f"{what} `dim`", table.dim, 1),
            optimizer=optimizer if own is None else own,
        )
        for argument, is_right, rule in _rules(name, table):
            if not is_right:
                value = getattr(table, argument)
                raise ValueError(f"{what} `{argument}` must be {rule}, got {value!r}.")
        for feature in table.features_of(name):
            if feature in users:
                raise ValueError(
                    f"{OWNER}: feature {feature!r} looks up table {users[feature]!r} and "
                    f"{name!r}: it can look up one (let `inputs` return it under two names)."
                )
            users[feature] = name
    return checked


def _rules(name: str, table: Table) -> Iterator[tuple[str, bool, str]]:
    """Return arguments of a table, whether each is right, and what it must be."""
    yield "num_rows", table.num_rows <= MOST_ROWS, f"at most {MOST_ROWS}, as ids are int32"
    yield "shard", table.shard in ("row", "column", "table"), '"row", "column" or "table"'
    yield "pooling", table.pooling in ("sum", "mean", None), '"sum", "mean" or None'
    rule = "a floating type, of 64 bits only with jax_enable_x64"
    yield "dtype", _is_floating(table.dtype), rule
    yield "init", table.init is None or callable(table.init), "a function (key, shape, dtype)"
    names = () if isinstance(table.features, str) else table.features_of(name)
    is_right = len(names) > 0 and all(isinstance(feature, str) for feature in names)
    yield "features", is_right, "a sequence of names, or None"
    named = table.position_weights
    leaves = named if isinstance(named, Mapping) else {} if named is None else {None: named}
    is_right = all(isinstance(leaf, str) for leaf in leaves.values())
    is_right = is_right and leaves.keys() <= {None, *table.features_of(name)}
    yield "position_weights", is_right, "the name of a leaf, or one per feature of the table"
    rule = f"made by {MAKERS}, or be that of js.embeddings"
    yield "optimizer", isinstance(table.optimizer, RowwiseOptimizer), rule


def _is_floating(dtype: Any) -> bool:
    """Return whether `dtype` is a floating type that jax does not truncate."""
    try:
        parsed = jnp.dtype(dtype)
    except TypeError:
        return False
    return jnp.issubdtype(parsed, jnp.floating) and jax.dtypes.canonicalize_dtype(parsed) == parsed
