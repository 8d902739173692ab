"""What a user says about one table."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from .._support.checks import as_int
from .._support.types import PyTree

OWNER = "embeddings"
SHARDS = ("row", "column", "table")
POOLINGS = ("sum", "mean", None)
# Numbers of stored rows are int32, and some beyond them mean that there is no row.
MOST_ROWS = 2**31 - 2**20


@dataclasses.dataclass(frozen=True)
class Table:
    """One embedding table of `js.embeddings`.

    Attributes:
      num_rows: ids are 0 to num_rows - 1.
      dim: length of a vector.
      shard: `"row"`: each device holds some rows, dealt out in turn so that frequent ids, which are
        often the small ones, lie on all devices. `"column"`: each holds some columns of all rows;
        the number of devices must divide `dim`. `"table"`: one device holds all of it; such tables
        of one `dim` and `dtype` are spread over the devices so that all hold about as many rows,
        in one array, in which each has room for the rows of the fullest: use it for many tables,
        since of a lone one all devices have the room.
      pooling: how the vectors of a bag become one: `"sum"`; `"mean"`, their sum divided by the
        number of ids, whatever the weights; None, not at all. A bag without ids gives 0.
      features: names of the inputs that look up this table; None: the one of the table's name.
      position_weights: name of a leaf of the dense parameters, such as `"towers/position"`, of
        shape (max_length,): the vector at place i of a bag is multiplied with entry i, before
        pooling. Or a name per feature.
      init: `init(key, shape, dtype)`, as those of `jax.nn.initializers`, called for blocks of rows,
        so it must treat all rows alike. None: uniform between -1 and 1 over sqrt(num_rows).
      dtype: of rows as they are stored and travel. Updates are computed in float32 and rounded to
        the nearest: in bfloat16 those below about 1/256 of a weight are lost.
    """

    num_rows: int
    dim: int
    shard: Literal["row", "column", "table"] = "row"
    pooling: Literal["sum", "mean"] | None = "sum"
    features: Sequence[str] | None = None
    position_weights: str | Mapping[str, str] | None = None
    init: Callable[..., jax.Array] | None = None
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        """Make plain ints of other integers; `js.embeddings` refuses what is none, by name."""
        for argument in ("num_rows", "dim"):
            number = as_int(getattr(self, argument))
            if number is not None:
                object.__setattr__(self, argument, number)

    def features_of(self, name: str) -> tuple[str, ...]:
        """The inputs that look up this table, whose name is `name`."""
        return (name,) if self.features is None else tuple(self.features)

    def position_weights_of(self, feature: str) -> str | None:
        """The leaf that holds the weights of positions of one input."""
        named = self.position_weights
        return named.get(feature) if isinstance(named, Mapping) else named


Tables = Mapping[str, Table]
"""Tables by name."""
Capacity = Mapping[str, int | None]
"""The slots per owner of each table; None stands for as many as there can be distinct ids."""


class WithTables(NamedTuple):
    """What belongs to the dense parameters beside what belongs to the tables.

    Attributes:
      dense: parameters, or the state of their optimizer.
      tables: stored tables, or the state of `js.embeddings`' row-wise optimizer.
    """

    dense: PyTree
    tables: PyTree


def check_tables(tables: Any) -> dict[str, Table]:
    """`tables` by name; `ValueError` naming the table and the argument that is wrong."""
    if not isinstance(tables, Mapping) or not tables:
        raise ValueError(
            f"{OWNER}: `tables` must map names to js.Table, and not be empty, got {tables!r}."
        )
    users: dict[str, str] = {}
    for name, table in tables.items():
        if not isinstance(name, str) or not isinstance(table, Table):
            raise ValueError(
                f"{OWNER}: `tables` must map names to js.Table, got {name!r}: {table!r}."
            )
        _check_table(name, table)
        for feature in table.features_of(name):
            if feature in users:
                raise ValueError(
                    f"{OWNER}: feature {feature!r} looks up table {users[feature]!r} and "
                    f"{name!r}: it can look up one (let `inputs` return it under two names)."
                )
            users[feature] = name
    return dict(tables)


def _check_table(name: str, table: Table) -> None:
    def refuse(argument: str, rule: str, value: Any) -> None:
        raise ValueError(f"{OWNER}: table {name!r}: `{argument}` {rule}, got {value!r}.")

    for argument in ("num_rows", "dim"):
        value = getattr(table, argument)
        if as_int(value, 1) is None:
            refuse(argument, "must be an int >= 1", value)
    if table.num_rows > MOST_ROWS:
        refuse("num_rows", f"can be at most {MOST_ROWS}, as ids are int32", table.num_rows)
    if table.shard not in SHARDS:
        refuse("shard", 'must be "row", "column" or "table"', table.shard)
    if table.pooling not in POOLINGS:
        refuse("pooling", 'must be "sum", "mean" or None', table.pooling)
    if not _is_floating(table.dtype):
        rule = "must be a floating type, of 64 bits only with jax_enable_x64"
        refuse("dtype", rule, table.dtype)
    if table.init is not None and not callable(table.init):
        refuse("init", "must be a function (key, shape, dtype)", table.init)
    features = table.features
    if features is not None and (
        isinstance(features, str) or not features or not all(isinstance(f, str) for f in features)
    ):
        refuse("features", "must be a sequence of names, or None", features)
    named = table.position_weights
    if isinstance(named, Mapping):
        unknown = [f for f in named if f not in table.features_of(name)]
        if unknown or not all(isinstance(leaf, str) for leaf in named.values()):
            refuse("position_weights", "must map features of the table to names of leaves", named)
    elif named is not None and not isinstance(named, str):
        refuse("position_weights", "must be the name of a leaf, or one per feature", named)


def _is_floating(dtype: Any) -> bool:
    """Whether arrays of this floating type can be made."""
    try:
        known = jnp.dtype(dtype)
    except TypeError:
        return False
    return jnp.issubdtype(known, jnp.floating) and jax.dtypes.canonicalize_dtype(known) == known
