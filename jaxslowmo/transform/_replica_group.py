"""A group of replicas that exchange: its axes, the form of what they send, and its verbs.

Trees like the parameters are packed into flat buffers, of each device's own blocks where leaves are
sharded inside a replica. Inside a `shard_map` or a `vmap` that leaves such axes to the compiler,
leaves are exchanged one by one instead, each laid out as it is.

A tree that all replicas have together is cut into blocks: replica i of R has the i-th of R equal
parts of each leaf, along a dimension of the leaf that R divides (`split_dimension`). A leaf without
one stays whole on each replica. So a block of the anchor lies where an ordinary sharding of the
leaf over the replicas would put it.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from .._support.checks import ArgumentError, checked_int
from .._support.scopes import AGREE
from .._support.types import AxisName, PyTree, axis_names
from ..collectives import (
    LARGE_BYTES,
    all_gather_rows,
    all_mean,
    coded_mean,
    exchange_in_chunks,
    exchange_in_slices,
    gather_slices,
    is_scattered_alone,
    mean_in_codec,
    permute,
    relative_weight,
    scatter_mean,
    scatter_mean_along,
    scatter_mean_in_codec,
    total_weight,
    uses_chunks,
)
from ..collectives.codecs import Codec, Half
from ..mesh import (
    axis_size,
    constrain_layout,
    is_bound,
    is_spmd,
    leaf_specs,
    require_axes,
    restrict_spec,
    sum_over,
    typed_specs,
)
from ..tree import (
    Buffer,
    BufferPlan,
    at_least_float32,
    leaf_names,
    note_buffers,
    plan_buffers,
    split_last,
)
from ._stacked import Arrays, StackedReplicas, own_block


def split_dimension(
    shape: Sequence[int], parts: int, inner: Sequence[int] = (), without: int | None = None
) -> int | None:
    """Return the dimension along which a leaf is cut into `parts` blocks; None: it stays whole.

    That is the first dimension that `parts` divides, of those that are whole inside a replica if
    there is one. A leaf without elements stays whole.

    Args:
      shape: shape of the leaf.
      parts: the number of replicas.
      inner: number of devices inside a replica that split each dimension; () for a whole leaf.
      without: a dimension that is never cut.
    """
    inner = [*inner, *[1] * (len(shape) - len(inner))]
    fits = [
        d
        for d, (size, n) in enumerate(zip(shape, inner, strict=True))
        if d != without and size % (n * parts) == 0 and 0 not in shape
    ]
    return min(fits, key=lambda d: (inner[d] > 1, d), default=None)


@dataclass(frozen=True)
class ReplicaGroup:
    """Replicas that exchange, and the form in which they send.

    Its verbs are called for one replica, in one of two places. Inside mapped axes (`shard_map`,
    `pmap`, `vmap`) every leaf is this device's. With `stacked`, in a training step, they are called
    under `jax.vmap` over the stacked arrays of all replicas, and run on their devices.

    Attributes:
      axis_name: mapped axis of the replicas, or several.
      local_axis_name: axis of the L devices inside a replica, which hold equal trees: each then
        exchanges 1/L of them. None: every device exchanges all.
      param_specs: `PartitionSpec` per leaf (or prefix of the tree) over the axes inside a replica
        that are not mapped. None: leaves are whole there.
      bucket_bytes: size in bytes at which a flat buffer is closed; None: one buffer per dtype.
      codec: encoding of buffers that are wider than its dtype; None: none.
      without: the dimension along which leaves that a function names are never cut into blocks:
        (function of the name, dimension). None: any dimension may be cut.
      is_cut: whether what all replicas have together is cut into blocks; else each has all of it.
        None: with `stacked`.
      stacked: the arrays of a step's replicas; None inside mapped axes.
    """

    axis_name: AxisName
    local_axis_name: AxisName | None = None
    param_specs: PyTree | None = None
    bucket_bytes: int | None = None
    codec: Codec | None = None
    without: tuple[Callable[[str], bool], int] | None = None
    is_cut: bool | None = True
    stacked: StackedReplicas | None = None

    @property
    def plain(self) -> "ReplicaGroup":
        """The same replicas, for trees that are not like the parameters, sent as they are."""
        return ReplicaGroup(self.axis_name, stacked=self.stacked)

    def with_layout(self, stacked: StackedReplicas | None, param_specs: PyTree) -> "ReplicaGroup":
        """Return this group for the arrays of a step, whose parameters have these layouts."""
        specs = param_specs if self.param_specs is None else self.param_specs
        return replace(self, stacked=stacked, param_specs=specs)

    def for_leaves(
        self,
        tree: PyTree,
        places: Sequence[int] | None,
        unflatten: Callable[[PyTree, list[Any]], PyTree],
    ) -> "ReplicaGroup":
        """Return this group for some leaves of a tree, in the form `unflatten(tree, leaves)`."""
        if places is None or self.param_specs is None:
            return self
        specs = leaf_specs(self.param_specs, tree)
        return replace(self, param_specs=unflatten(tree, [specs[i] for i in places]))

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of its axes between replicas."""
        return axis_names(self.axis_name)

    @property
    def bound_axes(self) -> tuple[str, ...]:
        """The names of all mapped axes over which its verbs communicate."""
        return tuple(dict.fromkeys((*self.axes, *axis_names(self.local_axis_name or ()))))

    @property
    def size(self) -> int:
        """The number of replicas."""
        if self.stacked is None:
            return axis_size(self.axis_name)
        return math.prod(self.stacked.mesh.shape[name] for name in self.axes)

    def require_bound(self, owner: str, more: str = "") -> None:
        """Raise `ValueError` unless all axes are bound, and local axes differ from replica axes.

        `more` is appended to the message for an axis that is not bound.
        """
        if self.stacked is None:
            # A collective over an unbound axis would fail with an empty AssertionError.
            require_axes(owner, "axis_name", self.axis_name, more)
            if self.local_axis_name is not None:
                require_axes(owner, "local_axis_name", self.local_axis_name, more)
        if both := {*self.axes} & {*axis_names(self.local_axis_name or ())}:
            raise ValueError(
                f"{owner}: `local_axis_name` must differ from `axis_name`, both name {min(both)!r}."
            )

    @property
    def cuts_state(self) -> bool:
        """Whether what all replicas have together is cut into blocks here."""
        return self.stacked is not None if self.is_cut is None else self.is_cut

    # Where verbs run.

    def layouts(self, tree: PyTree) -> tuple[P, ...] | None:
        """Return the layout of each leaf over the axes inside a replica that are not mapped here.

        The types of leaves show Explicit axes. None: only the compiler knows how leaves lie.

        Raises:
          ValueError: `param_specs` that do not fit the tree, or name an axis that is not here.
        """
        if self.stacked is not None:
            return leaf_specs(self.param_specs, tree)
        mesh, specs = jax.sharding.get_abstract_mesh(), self.param_specs
        if specs is None:
            specs = typed_specs(tree)
            if specs is None and _hides_layouts():
                return None
        # One spec may stand for a whole subtree, as in jit and shard_map.
        try:
            of_leaves = leaf_specs(specs, tree)
        except ValueError as error:
            raise ValueError(
                "`param_specs` must be a tree of PartitionSpec with the structure of the "
                f"parameters, or a prefix of it: {error}"
            ) from None
        named = {name for spec in of_leaves for entry in spec for name in axis_names(entry or ())}
        for name in sorted(named.difference(mesh.axis_names)):
            if not (is_bound(name) and axis_size(name) == 1):
                raise ValueError(
                    f"`param_specs` names axis {name!r}, which the mesh here does not have "
                    f"(axes: {', '.join(map(repr, mesh.axis_names)) or 'none'})."
                )
        return tuple(restrict_spec(spec, _inner_axes()) for spec in of_leaves)

    def blocks(self, tree: PyTree) -> PyTree:
        """Return the types of one device's blocks of a tree where `run` packs it."""
        leaves, treedef = jax.tree.flatten(tree)
        sizes = jax.sharding.get_abstract_mesh().shape

        def block(x: Any, spec: P) -> jax.ShapeDtypeStruct:
            entries = [*spec, *[None] * (len(x.shape) - len(spec))]
            parts = [math.prod(sizes[n] for n in axis_names(entry or ())) for entry in entries]
            shape = tuple(n // part for n, part in zip(x.shape, parts, strict=True))
            return jax.ShapeDtypeStruct(shape, x.dtype)

        specs = self.layouts(tree) or [P()] * len(leaves)
        return treedef.unflatten(map(block, leaves, specs))

    def local(self, tree: PyTree, specs: Sequence[P] | None = None) -> Arrays:
        """Return a tree that each replica has for itself, with `param_specs` or these layouts."""
        return Arrays(tree, self.layouts(tree) if specs is None else specs)

    def equal(self, tree: PyTree) -> Arrays:
        """Return a tree that is whole and equal on all replicas, such as a number."""
        leaves = jax.tree.leaves(tree)
        return Arrays(tree, [P()] * len(leaves), [None] * len(leaves))

    def shared_blocks(self, tree: PyTree, like: PyTree = None) -> Arrays:
        """Return a tree that all replicas have together, cut like `like`, its whole leaves."""
        like = tree if like is None else like
        return Arrays(tree, self.layouts(like), self.dimensions(like), self.axes)

    def run(
        self,
        fn: Callable[..., Any],
        arguments: Sequence[Arrays],
        *results: Arrays,
        packs: bool = False,
    ) -> Any:
        """Return `fn(group, *trees)`, a list of trees, called where the axes are mapped.

        `group` is this group there. `results` say where the results lie; of their trees only the
        types matter. Leaves whose layouts only the compiler knows are gathered if `fn` packs them,
        or sends them in a codec; else `fn` must take them one by one.
        """
        group = replace(self, stacked=None, param_specs=None)
        if self.stacked is not None:
            return self.stacked.run(functools.partial(fn, group), arguments, results)
        trees, inside = [x.tree for x in arguments], _inner_axes()
        packs = packs or self.codec is not None or all(x.specs is not None for x in arguments)
        if not inside or not packs or not any(map(jnp.ndim, jax.tree.leaves(trees))):
            return fn(self, *trees)
        # Each device packs its own blocks. All axes are mapped, also those over which no leaf is
        # sharded: on CPU (jax 0.10.2, 0.12.0) the compiler aborts on a sum in half precision of
        # which it chose the layout itself.
        return jax.shard_map(
            functools.partial(fn, group),
            in_specs=tuple(_as_tree(x) for x in arguments),
            out_specs=[_as_tree(x) for x in results],
            axis_names=set(inside),
            check_vma=False,
        )(*trees)

    # Verbs on whole trees.

    def mean(
        self, tree: PyTree, weight: jax.Array | None = None, *, role: str | None = None
    ) -> PyTree:
        """Return the mean of a tree over the replicas, in the leaves' dtypes.

        With a weight it is the weighted mean, or `tree` itself if all weights are 0. With a codec
        of 16 bits each replica's residual is added, so replicas then differ by it. `note_buffers`
        reports `role`, which says what the buffers are exchanged for.

        Communication: one all-reduce per buffer and one per leaf of 1 MiB or more, which on CPU is
          averaged in up to 64 blocks from 16 MiB, in the dtype of a codec that narrows it; with
          `local_axis_name` one per buffer of all leaves, 1/L of it per device, and an all-gather
          over that axis; with a weight, before, one of 8 bytes. None for a tree without leaves.
        """
        if not jax.tree.leaves(tree):
            return tree
        own = self.local(tree)

        def run(group: ReplicaGroup, tree: PyTree, weight: jax.Array | None) -> list[PyTree]:
            return [_mean(group, tree, weight, role)]

        return self.run(run, [own, self.local(weight, [P()])], own)[0]

    def shares(self, weight: jax.Array | None) -> tuple[jax.Array | None, jax.Array | None]:
        """Return the factor that makes a plain mean a weighted one, and whether any weighs.

        The factor is this replica's, () float; the other is () bool, equal on all. Both are None
        without a weight.

        Communication: with a weight one all-reduce of 8 bytes.
        """
        if weight is None:
            return None, None

        def run(group: ReplicaGroup, weight: jax.Array) -> list[jax.Array]:
            total = total_weight(weight, group.axis_name)
            return [relative_weight(weight, total, group.axis_name), total.weight > 0]

        types = jnp.zeros([], jnp.result_type(float)), jnp.zeros([], jnp.bool_)
        results = self.local(types[0], [P()]), self.equal(types[1])
        factor, anyone = self.run(run, [self.local(weight, [P()])], *results)
        return factor, anyone

    def mean_number(self, x: jax.Array) -> jax.Array:
        """Return the mean of () floats, equal on all replicas.

        Communication: one all-reduce of the number.
        """
        return self._reduce_number(lambda group, x: all_mean(x, group.axis_name), x)

    def largest(self, x: jax.Array) -> jax.Array:
        """Return the largest of the replicas' numbers, of any shape, equal on all.

        Communication: one all-reduce of the numbers.
        """

        # jax has no derivative of pmax, and inside vmap and jit it calls a custom rule
        # (jax.custom_jvp) without the axis. So each replica differentiates its own number through
        # this added 0; an infinite one would make it NaN, and on that replica only.
        def run(group: ReplicaGroup, x: jax.Array) -> jax.Array:
            zero = x - lax.stop_gradient(x)
            zero = jnp.where(jnp.isfinite(x), zero, 0)
            return lax.pmax(lax.stop_gradient(x), group.axes) + zero

        return self._reduce_number(run, x)

    def all_numbers(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return this replica's place, () int32, among the () numbers of all, (replicas,).

        Communication: one all-gather of the number.
        """

        def run(group: ReplicaGroup, x: jax.Array) -> list[jax.Array]:
            return [lax.axis_index(group.axes), lax.all_gather(x, group.axes)]

        number, every = jnp.zeros([], jnp.int32), jnp.zeros([self.size], x.dtype)
        own, all_of_them = self.run(
            run, [self.local(x, [P()])], self.local(number, [P()]), self.local(every, [P()])
        )
        return own, all_of_them

    def agree(self, flag: jax.Array) -> jax.Array:
        """Return whether the () bool `flag` is True on all replicas.

        Communication: one all-reduce of 4 bytes.
        """
        with jax.named_scope(AGREE):
            return self._reduce_number(
                lambda group, x: lax.psum((~x).astype(jnp.int32), group.axes) == 0, flag
            )

    def same(self, x: jax.Array) -> jax.Array:
        """Return a number that is equal on all replicas as a value of all of them together.

        Communication: none.
        """
        return self._reduce_number(lambda group, x: x, x)

    def _reduce_number(self, fn: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
        return self.run(lambda group, x: [fn(group, x)], [self.local(x, [P()])], self.equal(x))[0]

    def sum(self, tree: PyTree) -> PyTree:
        """Return the sum of a tree over the replicas, in the leaves' dtypes; all have it together.

        Communication: one all-reduce per buffer.
        """

        def run(group: ReplicaGroup, tree: PyTree) -> list[PyTree]:
            def total(buffer: Buffer, flat: jax.Array) -> jax.Array:
                del buffer
                return sum_over(flat, group.axis_name)

            return [packing_of(tree, group).map_buffers(total, tree)]

        own, whole = self.local(tree), [None] * len(jax.tree.leaves(tree))
        return self.run(run, [own], own._replace(cuts=whole), packs=True)[0]

    def permute(self, tree: PyTree, permutation: Sequence[tuple[int, int]]) -> PyTree:
        """Return the tree of the replica that sends to this one; zeros on one that none sends to.

        Args:
          tree: what this replica sends.
          permutation: pairs (source, destination), in which a replica is each at most once.

        Communication: one collective-permute per buffer; with `local_axis_name` 1/L of each per
          device, and an all-gather over that axis.
        """

        def run(group: ReplicaGroup, tree: PyTree) -> list[PyTree]:
            def permute_buffer(buffer: Buffer, flat: jax.Array) -> jax.Array:
                del buffer
                axes = group.axis_name
                return exchange_in_slices(
                    flat, group.local_axis_name, lambda x: permute(x, axes, permutation)
                )

            return [packing_of(tree, group).map_buffers(permute_buffer, tree)]

        return self.run(run, [self.local(tree)], self.local(tree), packs=True)[0]

    def mean_in_codec(self, tree: PyTree, *, role: str | None = None) -> tuple[PyTree, PyTree]:
        """Return the mean over replicas of what they send, and what of it this replica has lost.

        Communication: that of `collectives.mean_in_codec`, for each flat buffer.
        """
        run = functools.partial(_mean_in_codec, role=role)
        mean, lost = self.run(run, [self.local(tree)], self.local(tree), self.local(tree))
        return mean, lost

    # Verbs between whole trees and blocks.

    def dimensions(self, tree: PyTree) -> list[int | None]:
        """Return for each leaf the dimension along which it is cut; None: it stays whole."""
        leaves = jax.tree.leaves(tree)
        specs = self.layouts(tree)
        if not self.cuts_state or specs is None:
            return [None] * len(leaves)
        mesh: Any = jax.sharding.get_abstract_mesh()
        mesh = mesh if self.stacked is None else self.stacked.mesh
        names = [""] * len(leaves) if self.without is None else leaf_names(tree)
        is_stacked, dimension = self.without or (lambda name: False, 0)

        def leaf_dimension(name: str, x: Any, spec: P) -> int | None:
            inner = [math.prod(mesh.shape[n] for n in axis_names(e or ())) for e in spec]
            never = dimension % x.ndim if x.ndim and is_stacked(name) else None
            return split_dimension(x.shape, self.size, inner, never)

        return [leaf_dimension(*one) for one in zip(names, leaves, specs, strict=True)]

    def block(self, tree: PyTree) -> PyTree:
        """Return this replica's blocks of a tree that is equal on all.

        Communication: none.
        """
        cuts = self.dimensions(tree)

        def run(group: ReplicaGroup, tree: PyTree) -> list[PyTree]:
            leaves, treedef = jax.tree.flatten(tree)
            if group.size > 1:
                pairs = zip(leaves, cuts, strict=True)
                axes = group.axis_name
                leaves = [x if d is None else own_block(x, d, axes) for x, d in pairs]
            return [treedef.unflatten(leaves)]

        return self.run(run, [self.local(tree)], self.shared_blocks(tree))[0]

    def mean_scatter(self, tree: PyTree, *, role: str | None = None) -> PyTree:
        """Return this replica's blocks of the mean of a tree over the replicas.

        Communication: one reduce-scatter per buffer of the leaves that are cut, and one all-reduce
          per buffer of those that stay whole; with L local devices each sends 1/L.
        """
        run = functools.partial(_mean_scatter, cuts=self.dimensions(tree), role=role)
        return replace(self, codec=None).run(run, [self.local(tree)], self.shared_blocks(tree))[0]

    def mean_scatter_in_codec(
        self, tree: PyTree, *, role: str | None = None
    ) -> tuple[PyTree, PyTree]:
        """Return blocks of the mean of what replicas send in the codec, and what is lost.

        Where some leaves are cut, those that stay whole are sent as they are.

        Communication: for the leaves that are cut one all-to-all per buffer of the codec's bytes.
        """
        run = functools.partial(_mean_scatter, cuts=self.dimensions(tree), role=role)
        if not self.cuts_state:
            run = functools.partial(_mean_in_codec, role=role)
        mean, lost = self.run(run, [self.local(tree)], self.shared_blocks(tree), self.local(tree))
        return mean, lost

    def all_gather(self, blocks: PyTree, like: PyTree, *, codec: Codec | None = None) -> PyTree:
        """Return the whole tree of all replicas' blocks; leaves that stay whole are as they are.

        Args:
          blocks: this replica's blocks.
          like: tree of the shapes of whole leaves.
          codec: format in which blocks are sent; None sends them as they are.

        Communication: one all-gather per buffer; with L local devices each sends 1/L, and one
          all-gather over `local_axis_name` follows.
        """
        run = functools.partial(_all_gather, cuts=self.dimensions(like))
        shapes = jax.tree.map(lambda x, b: jax.ShapeDtypeStruct(x.shape, b.dtype), like, blocks)
        group = replace(self, codec=codec)
        whole = Arrays(shapes, self.layouts(like))
        return group.run(run, [self.shared_blocks(blocks, like)], whole)[0]


# The verbs where the axes are mapped.


def _mean(group: ReplicaGroup, tree: PyTree, weight: jax.Array | None, role: str | None) -> PyTree:
    axes, local, codec = group.axis_name, group.local_axis_name, group.codec
    factor, anyone = group.shares(weight)

    def unless_all_idle(mean: jax.Array, x: jax.Array) -> jax.Array:
        # If all replicas have run out of data the mean is 0 / 0: keep the values.
        return mean if anyone is None else jnp.where(anyone, mean, x)

    if codec is None and _is_by_leaf(group):
        tree = _as_laid_out(tree, group)
        mean = lambda x: unless_all_idle(all_mean(x, axes, factor=factor), x)  # noqa: E731
        return jax.tree.map(mean, tree)

    def mean_of(flat: jax.Array) -> jax.Array:
        # Each of L devices in a replica sends its part: N bytes leave a replica, not L * N.
        if isinstance(codec, Half):
            mean, residual = coded_mean(flat, codec, axes, local, factor=factor)
            mean += residual
        else:
            mean = all_mean(flat, axes, local, factor=factor)
        return unless_all_idle(mean, flat)

    packing = packing_of(tree, group, alone_bytes=LARGE_BYTES if local is None else None)

    def mean_of_buffer(buffer: Buffer, flat: jax.Array) -> jax.Array:
        if len(buffer.pieces) == 1 and local is None:
            # The compiler leaves out both reshapes, and with them the copies of packing.
            flat = flat.reshape(packing.shapes[buffer.leaves[0]])
        if uses_chunks(flat):
            return exchange_in_chunks(lambda x: [mean_of(x)], flat)[0].reshape(-1)
        return mean_of(flat).reshape(-1)

    return packing.map_buffers(mean_of_buffer, tree, role=role)


def _mean_in_codec(group: ReplicaGroup, tree: PyTree, *, role: str | None) -> list[PyTree]:
    codec, axes, local = group.codec, group.axis_name, group.local_axis_name
    assert codec is not None
    packing = packing_of(tree, group)
    pairs = packing.map(
        lambda buffer, flat: mean_in_codec(flat, axes, codec, local), packing.pack(tree, role=role)
    )
    return [packing.unpack([mean for mean, _ in pairs]), packing.unpack([x for _, x in pairs])]


def _mean_scatter(
    group: ReplicaGroup, tree: PyTree, *, cuts: Sequence[int | None], role: str | None
) -> list[PyTree]:
    leaves, treedef = jax.tree.flatten(_as_laid_out(tree, group))
    rest = [i for i, d in enumerate(cuts) if d is None]
    # What stays whole is small, as a rule, and sent in full.
    in_full = replace(group, codec=None).for_leaves(tree, rest, lambda _, specs: specs)
    means = in_full.mean([leaves[i] for i in rest], role=role)
    out = dict(zip(rest, means, strict=True))
    lost = {i: jnp.zeros_like(leaves[i]) for i in rest}
    axes, local, count = group.axis_name, group.local_axis_name, group.size
    codec = group.codec
    for places in _buffers(group, tree, cuts, role):
        parts, cut = [leaves[i] for i in places], [cuts[i] for i in places]
        if codec is None and _is_by_leaf(group):
            for i, x, d in zip(places, parts, cut, strict=True):
                out[i] = lax.psum_scatter(x, axes, scatter_dimension=d or 0, tiled=True) / count
            continue
        if _is_alone(group, parts, cut):
            out[places[0]] = scatter_mean_along(parts[0], axes, cut[0] or 0)
            continue
        rows = _in_rows(parts, cut, count)
        shapes = [_block_shape(x.shape, d, count) for x, d in zip(parts, cut, strict=True)]
        if codec is None:
            mine = scatter_mean(rows, axes, local)
        else:
            mine, left = scatter_mean_in_codec(rows, axes, codec, local)
            blocks = list(zip(shapes, cut, strict=True))
            lost |= zip(places, _from_rows(left, blocks), strict=True)
        out |= zip(places, _split(mine, shapes), strict=True)
    blocks = _as_laid_out(treedef.unflatten([out[i] for i in range(len(leaves))]), group)
    if codec is None:
        return [blocks]
    return [blocks, treedef.unflatten([lost[i] for i in range(len(leaves))])]


def _all_gather(group: ReplicaGroup, tree: PyTree, *, cuts: Sequence[int | None]) -> list[PyTree]:
    if group.size == 1:
        return [tree]
    leaves, treedef = jax.tree.flatten(_as_laid_out(tree, group))
    whole, axes, local = dict(enumerate(leaves)), group.axis_name, group.local_axis_name

    def whole_type(x: jax.Array, d: int | None) -> jax.ShapeDtypeStruct:
        shape = tuple(n * group.size if i == d else n for i, n in enumerate(x.shape))
        return jax.ShapeDtypeStruct(shape, x.dtype)

    types = [whole_type(x, d) for x, d in zip(leaves, cuts, strict=True)]
    for places in _buffers(group, types, cuts):
        parts, cut = [leaves[i] for i in places], [cuts[i] for i in places]
        if _is_alone(group, [types[i] for i in places], cut) or (
            group.codec is None and _is_by_leaf(group)
        ):
            for i, x, d in zip(places, parts, cut, strict=True):
                whole[i] = gather_slices(x, axes, dimension=d or 0)
            continue
        row = lax.concatenate([x.reshape(-1) for x in parts], 0)
        rows = all_gather_rows(row, axes, local, group.codec)
        blocks = [(x.shape, d) for x, d in zip(parts, cut, strict=True)]
        whole |= zip(places, _from_rows(rows, blocks), strict=True)
    return [treedef.unflatten([whole[i] for i in range(len(leaves))])]


def _as_laid_out(tree: PyTree, group: ReplicaGroup) -> PyTree:
    """Return the tree laid out by the group's specs over axes that are the compiler's here."""
    if group.param_specs is None:
        return tree
    specs = leaf_specs(group.param_specs, tree)
    return constrain_layout(tree, jax.tree.unflatten(jax.tree.structure(tree), specs))


def _is_by_leaf(group: ReplicaGroup) -> bool:
    """Return whether leaves are exchanged one by one, each laid out as it is.

    That is where the compiler shards them inside a replica: to pack them would gather them.
    """
    return is_spmd(group.axis_name) or _hides_layouts()


def _buffers(
    group: ReplicaGroup, tree: PyTree, cuts: Sequence[int | None], role: str | None = None
) -> list[list[int]]:
    """Return the positions of the leaves that each buffer of rows holds."""
    cut = [i for i, d in enumerate(cuts) if d is not None]
    if not cut:
        return []
    # Buffers of the leaves as they are, from the same plan as those of a mean.
    leaves = jax.tree.leaves(tree)
    wide = [jax.ShapeDtypeStruct(leaves[i].shape, at_least_float32(leaves[i].dtype)) for i in cut]
    alone = [
        k
        for k, (x, i) in enumerate(zip(wide, cut, strict=True))
        if _is_alone(group, [x], [cuts[i]])
    ]
    rest = [k for k in range(len(cut)) if k not in alone]
    buffers = packing_of([wide[k] for k in rest], group).buffers
    found = [[rest[label] for label in dict.fromkeys(buffer.leaves)] for buffer in buffers]
    found += [[k] for k in alone]
    if role is not None:
        names = leaf_names(tree)
        note_buffers(role, plan_buffers(wide, buckets=found).buffers, [names[i] for i in cut])
    return [[cut[k] for k in places] for places in found]


def _is_alone(group: ReplicaGroup, leaves: Sequence[Any], cuts: Sequence[int | None]) -> bool:
    """Return whether these leaves of a buffer are one that is scattered as it lies."""
    if len(leaves) != 1 or cuts[0] is None or group.codec or group.local_axis_name:
        return False
    return is_scattered_alone(leaves[0].shape, leaves[0].dtype, cuts[0], group.size)


def _block_shape(shape: Sequence[int], dimension: Any, count: int) -> tuple[int, ...]:
    return tuple(size // count if d == dimension else size for d, size in enumerate(shape))


def _in_rows(leaves: Sequence[jax.Array], dims: Sequence[Any], count: int) -> jax.Array:
    """Return (replicas, n): in row i the blocks of all leaves that belong to replica i."""

    def rows(x: jax.Array, d: int) -> jax.Array:
        lead = math.prod(x.shape[:d])
        split = lax.reshape(x, (lead, count, x.size // (lead * count)))
        return lax.reshape(split.swapaxes(0, 1), (count, x.size // count))

    return lax.concatenate([rows(x, d) for x, d in zip(leaves, dims, strict=True)], 1)


def _from_rows(rows: jax.Array, blocks: Sequence[tuple[Any, Any]]) -> list[jax.Array]:
    """Return the whole leaves, of blocks with these shapes and dimensions; see `_in_rows`."""
    count, sizes = rows.shape[0], [math.prod(shape) for shape, _ in blocks]

    def whole(x: jax.Array, shape: Sequence[int], d: int) -> jax.Array:
        lead = math.prod(shape[:d])
        split = lax.reshape(x, (count, lead, math.prod(shape) // lead)).swapaxes(0, 1)
        return lax.reshape(split, tuple(n * count if i == d else n for i, n in enumerate(shape)))

    parts = split_last(rows, sizes)
    return [whole(x, *one) for x, one in zip(parts, blocks, strict=True)]


def _split(row: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    parts = split_last(row, [math.prod(shape) for shape in shapes])
    return [lax.reshape(x, shape) for x, shape in zip(parts, shapes, strict=True)]


def _inner_axes() -> frozenset[str]:
    """Return the axes inside a replica that are not mapped here, inside of mapped ones."""
    mesh = jax.sharding.get_abstract_mesh()
    return frozenset(mesh.axis_names).difference(
        mesh.manual_axes if mesh.manual_axes else mesh.axis_names
    )


def _hides_layouts() -> bool:
    """Return whether leaves may be sharded over axes inside a replica that are not mapped here."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape[name] > 1 for name in _inner_axes())


def _as_tree(part: Arrays) -> PyTree:
    """Return the layouts inside a replica as a tree like the arrays."""
    structure = jax.tree.structure(part.tree)
    specs = [P()] * structure.num_leaves if part.specs is None else part.specs
    return structure.unflatten(list(specs)[: structure.num_leaves])


def check_axis_argument(owner: str, argument: str, axis_name: object) -> None:
    """Raise `ValueError` unless `axis_name` is a name or a tuple of distinct names."""
    # Called before tracing. Whether the axes are bound is checked at trace time.
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not all(isinstance(n, str) and n for n in names):
        raise ArgumentError(
            argument,
            f"{owner}: `{argument}` must be the name of a mapped axis or a tuple of names, "
            f"got {axis_name!r}.",
        )
    if len(set(names)) != len(names):
        raise ArgumentError(
            argument, f"{owner}: `{argument}` names an axis twice, got {axis_name!r}."
        )


def check_are_specs(owner: str, param_specs: PyTree | None) -> list[P]:
    """Return the leaves of a tree of specs; raise `ValueError` if it has leaves of other types."""
    specs = jax.tree.leaves(param_specs, is_leaf=lambda x: isinstance(x, P))
    if wrong := [x for x in specs if not isinstance(x, P)]:
        raise ValueError(
            f"{owner}: `param_specs` must be a tree of PartitionSpec, got a leaf of type "
            f"{type(wrong[0]).__name__}."
        )
    return specs


def checked_bytes(owner: str, argument: str, size: object) -> int:
    """Return a size in bytes as an int; raise `ValueError` unless it is an integer >= 0."""
    return checked_int(f"{owner}: `{argument}` is a size in bytes and", size, 0)


def checked_group(
    owner: str,
    axis_name: AxisName,
    local_axis_name: AxisName | None = None,
    bucket_bytes: int | None = None,
    codec: Codec | None = None,
    param_specs: PyTree | None = None,
) -> ReplicaGroup:
    """Return the `ReplicaGroup` of these arguments, which are checked.

    Raises:
      ValueError: axes that are no names, specs that are no `PartitionSpec`s or name the replica
        axis, a negative size, or a codec that is no `Codec`.
    """
    check_axis_argument(owner, "axis_name", axis_name)
    if local_axis_name is not None:
        check_axis_argument(owner, "local_axis_name", local_axis_name)
    if bucket_bytes is not None:
        bucket_bytes = checked_bytes(owner, "bucket_bytes", bucket_bytes)
    specs = check_are_specs(owner, param_specs)
    replicas = set(axis_names(axis_name))
    if stacked := [x for x in specs if replicas & {n for e in x for n in axis_names(e or ())}]:
        raise ValueError(
            f"{owner}: `param_specs` are of one copy, `P(*leaf.sharding.spec[1:])` of stacked "
            f"leaves, and must not name the axis of the replicas, {axis_name!r}, got {stacked[0]}."
        )
    if codec is not None and not isinstance(codec, Codec):
        raise ArgumentError(
            "codec",
            f"{owner}: `codec` must be None or one of js.codecs, such as js.codecs.int8() or "
            f"js.codecs.float16(error_feedback=True), got {codec!r}.",
        )
    return ReplicaGroup(axis_name, local_axis_name, param_specs, bucket_bytes, codec)


def packing_of(
    tree: PyTree, replicas: ReplicaGroup, *, alone_bytes: int | None = None
) -> BufferPlan:
    """Return the packing of trees like `tree`, of a device's blocks, in the group's buffers.

    Leaves of at least `alone_bytes` have a buffer each; None packs all.
    """
    leaves, treedef = jax.tree.flatten(tree)
    types = tuple((leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves)
    return _plan_packing(treedef, types, replicas.bucket_bytes, alone_bytes)


@functools.lru_cache(maxsize=128)
def _plan_packing(
    treedef: Any,
    types: tuple[tuple[tuple[int, ...], np.dtype], ...],
    bucket_bytes: int | None,
    alone_bytes: int | None,
) -> BufferPlan:
    like = treedef.unflatten([jax.ShapeDtypeStruct(*each) for each in types])
    limits = None if bucket_bytes is None else (bucket_bytes,)
    return plan_buffers(like, limits=limits, alone_bytes=alone_bytes)
