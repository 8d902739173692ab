"""What travels between stages, and the buffers that the scan carries: rows of arrays, by number."""

import heapq
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from ..._support.types import PyTree

Values = Sequence[jax.Array]
Buffers = list[jax.Array]


_EMPTY: Callable[..., jax.Array] = (
    jnp.zeros
)  # nothing may depend on it: tests have NaN in its place


def empty(shape: Sequence[int], dtype: Any) -> jax.Array:
    """What stands where nothing was written yet, and is sent where nothing is to be sent."""
    return _EMPTY(shape, dtype)


class Ring:
    """Rows that each hold the values of one of several kinds of stages.

    Values of different kinds that are alike in shape and dtype share arrays, which have as many
    rows as the one of these kinds that keeps most.

    Args:
      kinds: per kind of stage the types of its values.
      rows: per kind of stage, how many of its values are kept at once.
    """

    def __init__(self, kinds: Sequence[Sequence[Any]], rows: Sequence[int]) -> None:
        self._rows: list[int] = []
        self._types: list[tuple[tuple[int, ...], Any]] = []
        self._places: list[list[int]] = []
        for values, count in zip(kinds, rows, strict=True):
            free = list(range(len(self._types)))
            own = []
            for value in values:
                kind = tuple(value.shape), value.dtype
                found = next((i for i in free if self._types[i] == kind), None)
                if found is None:
                    found = len(self._types)
                    self._types.append(kind)
                    self._rows.append(count)
                else:
                    free.remove(found)
                    self._rows[found] = max(self._rows[found], count)
                own.append(found)
            self._places.append(own)

    def start(self) -> Buffers:
        """Buffers in which nothing lies."""
        types = zip(self._rows, self._types, strict=True)
        return [empty((rows, *shape), dtype) for rows, (shape, dtype) in types]

    def read(self, buffers: Buffers, kind: int, row: jax.Array) -> tuple[jax.Array, ...]:
        """What lies in a row, for a stage of this kind."""
        return tuple(row_of(buffers[i], row) for i in self._places[kind])

    def written(self, buffers: Buffers, kind: int, row: jax.Array, values: Values) -> Buffers:
        """`buffers` with the values of a stage of this kind in a row."""
        new = list(buffers)
        for i, value in zip(self._places[kind], values, strict=True):
            new[i] = with_row(new[i], row, value)
        return new

    def nothing(self) -> list[jax.Array]:
        """What an operation without values puts in no row."""
        return [empty(shape, dtype) for shape, dtype in self._types]

    def spread(self, kind: int, values: Values) -> list[jax.Array]:
        """The values of a stage of this kind, each at the place of its array."""
        found = self.nothing()
        for i, value in zip(self._places[kind], values, strict=True):
            found[i] = value.astype(found[i].dtype)
        return found

    def used(self, kind: int | None) -> np.ndarray:
        """(arrays,) bool: in which of them a stage of this kind has values; None: in none."""
        found = np.zeros(len(self._types), bool)
        if kind is not None:
            found[self._places[kind]] = True
        return found


def row_of(buffer: jax.Array, row: Any) -> jax.Array:
    """A row of a buffer; of the only one without looking for it."""
    row = 0 if buffer.shape[0] == 1 else row
    return lax.dynamic_index_in_dim(buffer, row, 0, keepdims=False)


def with_row(buffer: jax.Array, row: Any, value: jax.Array) -> jax.Array:
    """`buffer` with another row."""
    return lax.dynamic_update_index_in_dim(buffer, value.astype(buffer.dtype), row, 0)


def received(buffers: Buffers, arrived: Values, row: jax.Array) -> Buffers:
    """`buffers` with what has arrived in a row, or as they were for row -1."""
    at = jnp.maximum(row, 0)
    return [row_set(*pair, at, row >= 0) for pair in zip(buffers, arrived, strict=True)]


def row_set(buffer: jax.Array, value: jax.Array, row: jax.Array, is_set: jax.Array) -> jax.Array:
    """`buffer` with another row where `is_set`, else as it was; no more than the row is moved."""
    row = jnp.minimum(row, buffer.shape[0] - 1)
    return with_row(buffer, row, jnp.where(is_set, value, row_of(buffer, row)))


class Writing(Protocol):
    """What a branch gives for the buffers, and what they are after it."""

    def idle(self, buffers: Buffers) -> Values:
        """Of a branch that leaves nothing."""
        ...

    def left(self, buffers: Buffers, kind: int, row: jax.Array, values: Values) -> Values:
        """Of one that leaves the values of a stage of this kind in a row."""
        ...

    def taken(self, buffers: Buffers, left: Values, row: jax.Array, branch: jax.Array) -> Buffers:
        """The buffers after branch number `branch` has given `left`."""
        ...


class InBranches:
    """Branches hand the buffers on, with a row written.

    TPU's compiler does it where they stand; others copy the whole of what a branch hands on.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring

    def idle(self, buffers: Buffers) -> Values:
        return buffers

    def left(self, buffers: Buffers, kind: int, row: jax.Array, values: Values) -> Values:
        return self._ring.written(buffers, kind, row, values)

    def taken(self, buffers: Buffers, left: Values, row: jax.Array, branch: jax.Array) -> Buffers:
        del buffers, row, branch
        return list(left)


class BehindBranches:
    """Branches give a row, which is written behind them: no compiler copies more than that.

    It takes the memory of some more rows.

    Args:
      ring: of the buffers.
      kinds: per branch the kind of stage that leaves something; None where nothing is left.
    """

    def __init__(self, ring: Ring, kinds: Sequence[int | None]) -> None:
        self._ring = ring
        self._used = np.stack([ring.used(kind) for kind in kinds])

    def idle(self, buffers: Buffers) -> Values:
        del buffers
        return self._ring.nothing()

    def left(self, buffers: Buffers, kind: int, row: jax.Array, values: Values) -> Values:
        del buffers, row
        return self._ring.spread(kind, values)

    def taken(self, buffers: Buffers, left: Values, row: jax.Array, branch: jax.Array) -> Buffers:
        is_set = jnp.asarray(self._used)[branch]
        pairs = zip(buffers, left, strict=True)
        return [row_set(*pair, row, is_set[i]) for i, pair in enumerate(pairs)]


def writing_to(ring: Ring, kinds: Sequence[int | None], *, in_branches: bool) -> Writing:
    """The one or the other; `kinds` per branch, None where nothing is left."""
    return InBranches(ring) if in_branches else BehindBranches(ring, kinds)


def writes_in_branches(mesh: Mesh) -> bool:
    """Whether the compiler for these devices lets branches write where buffers stand."""
    return mesh.devices.flat[0].platform == "tpu"


Key = TypeVar("Key", bound=Hashable)


class Lifetime(NamedTuple):
    """From when on a value is kept until when it is last read, both included."""

    start: int
    end: int


def rows_of(lifetimes: Mapping[Key, Lifetime]) -> tuple[dict[Key, int], int]:
    """A row for every value, so that no two that live at the same time share one.

    Returns:
      The rows, and how many there are: the most values that live at once.
    """
    rows: dict[Key, int] = {}
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # until when, which row
    count = 0
    for key, life in sorted(lifetimes.items(), key=lambda item: item[1]):
        while busy and busy[0][0] < life.start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row, count = count, count + 1
        rows[key] = row
        heapq.heappush(busy, (life.end, row))
    return rows, count


@dataclass(frozen=True)
class Activations:
    """The type of what every stage but the last gives to the next.

    Attributes:
      treedef: of it.
      types: of its leaves.
    """

    treedef: Any
    types: tuple[Any, ...]

    @property
    def floating(self) -> tuple[int, ...]:
        """Positions of the leaves that have cotangents."""
        return tuple(i for i, x in enumerate(self.types) if jnp.issubdtype(x.dtype, jnp.inexact))

    @property
    def cotangents(self) -> tuple[Any, ...]:
        """Types of the cotangents."""
        return tuple(self.types[i] for i in self.floating)

    def flat(self, y: PyTree) -> list[jax.Array]:
        """The leaves, of the dtypes that the type says."""
        leaves = jax.tree.leaves(y)
        return [jnp.asarray(x, t.dtype) for x, t in zip(leaves, self.types, strict=True)]

    def tree(self, leaves: Values) -> PyTree:
        """The way back from `flat`."""
        return self.treedef.unflatten(leaves)

    def flat_cotangents(self, dx: PyTree) -> list[jax.Array]:
        """Of a tree with None for leaves without any."""
        leaves = self.treedef.flatten_up_to(dx)
        return [jnp.asarray(leaves[i], self.types[i].dtype) for i in self.floating]

    def cotangent_tree(self, leaves: Values) -> PyTree:
        """The way back from `flat_cotangents`."""
        own = dict(zip(self.floating, leaves, strict=True))
        return self.treedef.unflatten([own.get(i) for i in range(len(self.types))])


def nothing(types: Sequence[Any]) -> list[jax.Array]:
    """What is sent where nothing is to be sent."""
    return [empty(x.shape, x.dtype) for x in types]


def activations_of(results: Sequence[PyTree]) -> Activations:
    """The one type of what the stages before the last give.

    Args:
      results: types of their results, in the order of the model.

    Raises:
      ValueError: two that differ in structure, shapes or dtypes.
    """
    if not results:
        return Activations(jax.tree.structure(()), ())
    leaves, treedef = jax.tree.flatten(results[0])
    first = _text(results[0])
    for k, other in enumerate(results[1:], start=1):
        if _text(other) != first or jax.tree.structure(other) != treedef:
            raise ValueError(
                "`model`: one program sends activations of one type between all stages, and here "
                f"stage 0 gives {first}, but stage {k} {_text(other)}. Cut the model elsewhere "
                '(`parts`), let layers give the same type, or use `executor`="host", which does '
                "not need it."
            )
    return Activations(treedef, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves))


def _text(tree: PyTree) -> str:
    return str(jax.tree.map(lambda x: _Type(f"{x.dtype}{list(x.shape)}"), tree))


class _Type(str):
    """A type that prints without quotes."""

    def __repr__(self) -> str:
        return str(self)
