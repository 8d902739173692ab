"""The collectives of a program, by its HLO text: what moves, in which loops, over which axes.

A parser of the text, mesh axes and groups of devices, and the tree of collectives made of both.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np

from .._support.scopes import CONTENT, PADDING, PHASE

# The text: computations, instructions, types, trip counts of loops.

_COMPUTATION = re.compile(r"(ENTRY )?%?(\S+) \(.*\{\s*$")
_LINE = re.compile(r"\s+(ROOT )?%?(\S+) = (.*)$")
# A type may be a tuple, whose brackets may be nested; no element of it looks like an opcode.
_INSTRUCTION = re.compile(r"(\(.*?\)|\S+) ([a-z][\w-]*)\((.*?)\)(?=,|$)(.*)")
_CALLED = re.compile(r", (?:calls|to_apply|condition|body|\w+_computations?)=(\{[^}]*\}|[^,]+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_SHAPE = re.compile(r"\b([a-z]\w*)\[([^\]]*)\]")
_ELEMENT = re.compile(r"([a-z]+?)(\d+)(e\w+)?")
_KINDS = {"bf": "bfloat", "c": "complex", "f": "float", "s": "int", "u": "uint"}
_KNOWN_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# Transformations wrap scope names, as in "transpose(jvp(phase:slow))", hence the brackets.
_PHASE = re.compile(rf"{PHASE}([^/()]+)")
_CONTENT = re.compile(rf"(?:^|[/(])({'|'.join(CONTENT)})(?=[/)]|$)")
_PADDING = re.compile(rf"{PADDING}(\d+)of(\d+)")


def parse_phase(scope: str) -> str | None:
    """Return the innermost phase that a scope path names, if any.

    >>> parse_phase("jit(f)/cond/branch_1_fun/phase:slow/phase:average/psum")
    'average'
    """
    phases = _PHASE.findall(scope)
    return phases[-1] if phases else None


class Scopes(NamedTuple):
    """The phase and content of an operation, read from the names of the scopes around it.

    Attributes:
      phase: innermost `jax.named_scope("phase:NAME")`; None without one.
      content: what a collective there sends, a value of `scopes.CONTENT`; "" if none says it.
      used: share of its bytes that are no padding.
    """

    phase: str | None = None
    content: str = ""
    used: Fraction = Fraction(1)

    @classmethod
    def parse(cls, path: str, caller: "Scopes") -> "Scopes":
        """Return what a scope path says, and what that of the caller says where it says nothing."""
        names, paddings = _CONTENT.findall(path), _PADDING.findall(path)
        phase, content = parse_phase(path) or caller.phase, caller.content
        if names:
            content = CONTENT[names[-1]]
        used = math.prod((1 - Fraction(int(a), int(b)) for a, b in paddings), start=Fraction(1))
        return cls(phase, content, used if paddings else caller.used)


def parse_scope(text: str) -> str:
    """Return the scope path in the text of an instruction; "" without one."""
    match = _OP_NAME.search(text)
    return match[1] if match else ""


@dataclass(frozen=True)
class Instruction:
    """One instruction: `name = type opcode(inside), attributes`."""

    name: str
    type: str
    opcode: str
    inside: str
    attributes: str

    @cached_property
    def operands(self) -> list[str]:
        """The names of its operands."""
        return re.findall(r"%([\w.\-]+)", self.inside)

    @cached_property
    def callees(self) -> list[str]:
        """The names of the computations that it calls, in the order of the text."""
        return re.findall(r"[\w.\-]+", " ".join(_CALLED.findall(self.attributes)))


@dataclass
class Computation:
    """A computation; instructions are kept as text and parsed when asked for."""

    name: str
    lines: dict[str, str] = field(default_factory=dict)
    root: str = ""

    def instruction(self, name: str) -> Instruction:
        """Parse one instruction."""
        match = _INSTRUCTION.match(self.lines[name])
        assert match is not None, self.lines[name]
        return Instruction(name, *match.groups())

    def select(self, pattern: re.Pattern[str]) -> Iterator[Instruction]:
        """Return the instructions in whose text a pattern is found, in program order."""
        return (self.instruction(name) for name, text in self.lines.items() if pattern.search(text))

    def skip_copies(self, name: str) -> Instruction:
        """Return the instruction that computes a value, without copies of it."""
        instruction = self.instruction(name)
        while instruction.opcode in ("copy", "bitcast"):
            instruction = self.instruction(instruction.operands[0])
        return instruction

    def only_phase(self) -> str | None:
        """Return the one phase that its instructions name; None if they name several or none."""
        phases = {parse_phase(parse_scope(text)) for text in self.lines.values()} - {None}
        return phases.pop() if len(phases) == 1 else None


@dataclass(frozen=True)
class HloModule:
    """An HLO module: its first line, its computations by name and the name of the first to run."""

    header: str
    computations: dict[str, Computation]
    entry: str

    @property
    def num_devices(self) -> int:
        """The number of devices that the module is written for."""
        counts = re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", self.header)
        return math.prod(map(int, counts))


def parse_module(text: str) -> HloModule:
    """Split the text of a module into computations."""
    computations: dict[str, Computation] = {}
    entry = ""
    current = Computation("")
    for line in text.splitlines():
        if match := _LINE.match(line):
            current.lines[match[2]] = match[3]
            current.root = match[2] if match[1] else current.root
        elif match := _COMPUTATION.match(line):
            current = computations[match[2]] = Computation(match[2])
            entry = match[2] if match[1] else entry
    return HloModule(text.partition("\n")[0], computations, entry)


def shapes(type_text: str) -> list[tuple[str, int]]:
    """Return (dtype, bytes) of every array in a type; layouts are ignored.

    Dtypes have their names in jax. Types narrower than a byte are packed.

    >>> shapes("(bf16[8,128]{1,0:T(8,128)S(1)}, u32[], f8e4m3fn[2])")
    [('bfloat16', 2048), ('uint32', 4), ('float8_e4m3fn', 2)]
    """
    arrays = []
    for element, dims in _SHAPE.findall(type_text):
        name, bits = {"pred": ("bool", 8)}.get(element, (element, 0))
        if match := _ELEMENT.fullmatch(element):
            kind, width, layout = match.groups()
            name = _KINDS.get(kind, kind) + width + (f"_{layout}" if layout else "")
            bits = int(width)
        size = math.prod(int(d) for d in re.findall(r"\d+", dims))
        arrays.append((name, (size * bits + 7) // 8))
    return arrays


class _CarryIndex(NamedTuple):
    """The index of a value that a loop carries from iteration to iteration."""

    index: int


def trip_count(loop: Instruction, within: Computation, module: HloModule) -> int | None:
    """Return the number of iterations of a `while`, or None where the program does not say so.

    Only CPU and GPU code state it. Elsewhere `for (i = start; i < stop; i += step)` is recognised,
    whose `stop` is a constant, or a carried value that does not change.
    """
    if stated := _KNOWN_TRIP_COUNT.search(loop.attributes):
        return int(stated[1])
    condition, body = (module.computations[name] for name in loop.callees)
    compare = condition.instruction(condition.root)
    if ", direction=LT" not in compare.attributes:
        return None
    counter, stop = (_value(name, condition) for name in compare.operands)
    starts, ends = within.skip_copies(loop.operands[0]), body.skip_copies(body.root)
    if not isinstance(counter, _CarryIndex) or {starts.opcode, ends.opcode} != {"tuple"}:
        return None
    if isinstance(stop, _CarryIndex):
        stays = _value(ends.operands[stop.index], body) == stop
        stop = _value(starts.operands[stop.index], within) if stays else None
    start = _value(starts.operands[counter.index], within)
    total = body.skip_copies(ends.operands[counter.index])
    terms = [_value(name, body) for name in total.operands] if total.opcode == "add" else []
    step = sum(term for term in terms if isinstance(term, int)) if counter in terms else 0
    if not isinstance(start, int) or not isinstance(stop, int) or step <= 0:
        return None
    return max(0, -(-(stop - start) // step))


def _value(name: str, within: Computation) -> int | _CarryIndex | None:
    """Return a constant integer, or the index of a carried value; None for other values."""
    op = within.skip_copies(name)
    if op.opcode == "constant" and re.fullmatch(r"-?\d+", op.inside):
        return int(op.inside)
    if op.opcode == "get-tuple-element":
        index = re.search(r"index=(\d+)", op.attributes)
        if index and within.instruction(op.operands[0]).opcode == "parameter":
            return _CarryIndex(int(index[1]))
    return None


# Mesh axes, and the groups of devices that collectives run over.

UNKNOWN_AXIS = "?"

# Groups, or (source, target) pairs, of logical device numbers. () is one group of all devices, and
# None means that the text could not be read.
Groups = tuple[tuple[int, ...], ...] | None


@dataclass(frozen=True)
class MeshAxes:
    """Names and sizes of the axes of a mesh; `ids` are logical device numbers in mesh order."""

    axes: tuple[tuple[str, int], ...]
    ids: tuple[int, ...]
    # Whether device i belongs to TPU slice i // (devices per slice). Programs for several slices
    # are written for one slice and number only its devices, so their groups can be read only then.
    slice_major: bool = field(default=True, compare=False)


def mesh_axes(mesh: Any) -> MeshAxes:
    """Return the axes of a `jax.sharding.Mesh` or `AbstractMesh`.

    Programs number devices by their place in the device assignment, which is the mesh order.
    """
    devices = mesh.devices.flat if isinstance(mesh, jax.sharding.Mesh) else ()
    slices = [getattr(device, "slice_index", None) or 0 for device in devices]
    axes = tuple((str(name), size) for name, size in mesh.shape.items())
    return MeshAxes(axes, tuple(range(mesh.size)), slices == sorted(slices))


def axes_of_meshes(values: Iterable[Any]) -> list[MeshAxes]:
    """Return the axes of those values that are meshes, or shardings with one."""
    meshes = (getattr(value, "mesh", value) for value in values)
    return [mesh_axes(mesh) for mesh in meshes if hasattr(mesh, "axis_names")]


_DECLARED = re.compile(r"#sdy\.mesh<\[([^\]]+)\](?:, device_ids=\[([^\]]*)\])?>")
_SIZE = re.compile(r"""["']([^"']*)["']=(\d+)""")
_USED = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")
_LISTED = re.compile(r"\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"(?:\[([\d,]+)\]<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?")
_OF_MESH = re.compile(
    r"mesh\[(?P<axes>[^\]]*)\](?:, device_ids=\((?P<ids>(?:[^()]|\([^()]*\))*)\))?"
    r" \{(?P<used>[^}]*)\}"
)


def declared_meshes(header: str) -> list[MeshAxes]:
    """Return the meshes that the first line of an HLO module declares; only Shardy writes them."""
    return [_mesh(*texts) for texts in _DECLARED.findall(header)]


def _mesh(axes: str, ids: str) -> MeshAxes:
    sizes = tuple((name, int(size)) for name, size in _SIZE.findall(axes))
    return MeshAxes(sizes, device_order(ids, math.prod(size for _, size in sizes)))


def parse_groups(text: str) -> Groups:
    """Return the groups (or source-target pairs) with which a text begins, as HLO has them.

    Args:
      text: `{{0,1},{2,3}}`; `{}` (all devices); the iota form `[2,4]<=[8]` with an optional
        transpose, `[4,2]<=[2,4]T(1,0)`; or the mesh form `mesh['a'=2,'b'=4] {'b'}`, with an
        optional device order `, device_ids=([2,4]T(1,0))` and sub-axes `'b':(2)2`.

    Returns:
      A tuple of groups, () for all devices, None if the text has another form.

    >>> parse_groups("[4,2]<=[2,4]T(1,0)")
    ((0, 4), (1, 5), (2, 6), (3, 7))
    """
    if match := _IOTA.match(text):
        return _rows(np.reshape(device_order(match[0], 0), _ints(match[1])))
    if match := _OF_MESH.match(text):
        mesh = _mesh(match["axes"], match["ids"] or "")
        sizes, used = dict(mesh.axes), _USED.findall(match["used"])
        return groups_of_axes(mesh, [(x, int(b or 1), int(n or sizes[x])) for x, b, n in used])
    if match := _LISTED.match(text):
        return tuple(tuple(_ints(group)) for group in re.findall(r"\{([\d,]*)\}", match[1]))
    return None


def device_order(text: str, total: int) -> tuple[int, ...]:
    """Return the device numbers of a mesh: `[2,4]T(1,0)`, `[8]<=[2,4]T(1,0)` or a plain list.

    Without a text they are those from 0 to `total`.
    """
    if match := _IOTA.fullmatch(text):
        dims = _ints(match[2])
        ids = np.arange(math.prod(dims)).reshape(dims).transpose(_ints(match[3] or "") or None)
        return tuple(ids.ravel().tolist())
    return tuple(_ints(text) or range(total))


def _ints(text: str) -> list[int]:
    return [int(x) for x in re.findall(r"\d+", text)]


def groups_of_axes(mesh: MeshAxes, used: list[tuple[str, int, int]]) -> tuple[tuple[int, ...], ...]:
    """Return the groups of devices that differ only along some axes of a mesh.

    Args:
      mesh: the mesh.
      used: (axis, before, size) each: the part of the axis that remains after splitting it into
        (before, size, rest); a whole axis is (name, 1, its size).
    """
    shape: list[int] = []
    place: dict[tuple[str, int], int] = {}  # (axis, before) -> dimension after the split
    for name, size in mesh.axes:
        cuts = {1, size}.union(*({b, b * part} for axis, b, part in used if axis == name))
        for low, high in itertools.pairwise(sorted(cuts)):
            place[name, low] = len(shape)
            shape.append(high // low)
    # An axis of size 1 has no dimension left after the split: nothing to group.
    wanted = [place[name, before] for name, before, part in used if part > 1]
    rest = [d for d in range(len(shape)) if d not in wanted]
    grid = np.reshape(mesh.ids, shape).transpose(rest + wanted)
    return _rows(grid.reshape(-1, math.prod(shape[d] for d in wanted)))


def _rows(table: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, table.tolist()))


@lru_cache(maxsize=256)
def _candidates(mesh: MeshAxes) -> list[tuple[str, int, frozenset[frozenset[int]]]]:
    """Return (name, group size, groups) of every set of axes larger than 1, few axes first."""
    large = [(name, 1, size) for name, size in mesh.axes if size > 1]
    sets = (s for count in range(len(large)) for s in itertools.combinations(large, count + 1))
    candidates = []
    for used in sets:
        groups, names = groups_of_axes(mesh, [*used]), ",".join(name for name, *_ in used)
        candidates.append((names, len(groups[0]), frozenset(map(frozenset, groups))))
    return candidates


def axis_of(groups: Groups, pairs: bool, meshes: tuple[MeshAxes, ...]) -> tuple[str, int]:
    """Return the mesh axes that a collective runs over, and its group size.

    Args:
      groups: groups of devices, or (source, target) pairs.
      pairs: which of the two.
      meshes: the meshes of the program; the first one that matches names the axis.

    Returns:
      (axis, group size). The axis is a name, names joined by "," or "?" when no set of axes has
      these groups (pairs: when no set of axes connects them). Size 1: nothing moves; 0: unknown.
    """
    if groups == () and not pairs:
        groups = (meshes[0].ids,) if meshes else None
    if groups is None:
        return UNKNOWN_AXIS, 0
    moving = [group for group in groups if len(set(group)) > 1]
    if not moving:
        return UNKNOWN_AXIS, 1
    wanted = frozenset(map(frozenset, groups))
    for mesh in meshes:
        for name, size, members in _candidates(mesh):
            group_of = {i: group for group in members for i in group}
            if all(b in group_of.get(a, ()) for a, b in moving) if pairs else members == wanted:
                return name, size
    return UNKNOWN_AXIS, len({*itertools.chain(*moving)}) if pairs else max(map(len, moving))


# The collectives of a program, as a tree of loops and conditionals.

COLLECTIVES = (
    "all-reduce", "reduce-scatter", "all-gather", "collective-permute", "all-to-all",
    "ragged-all-to-all", "collective-broadcast", "send", "recv",
)  # fmt: skip


class Collective(NamedTuple):
    """One collective instruction."""

    name: str
    groups: Groups
    nbytes: int  # payload of one device, see `CommRow.bytes`
    dtypes: tuple[str, ...]
    scopes: Scopes = Scopes()
    pairs: bool = False  # `groups` holds (source, target) pairs
    pattern: str = ""  # what a send is a part of, if that is known

    @property
    def phase(self) -> str | None:
        """The innermost `jax.named_scope("phase:NAME")` around it."""
        return self.scopes.phase


class Branches(NamedTuple):
    """A conditional: exactly one of the blocks runs."""

    blocks: tuple["Block", ...]


class Loop(NamedTuple):
    """A loop around a block; `trip_count` is None where the program does not tell."""

    block: "Block"
    trip_count: int | None


Block = tuple[Collective | Branches | Loop, ...]


class ProgramCollectives(NamedTuple):
    """A tree of collectives, and phases, each with whether it is in a conditional.

    These are the phases of collectives, None for one without, and those that a traced program names
    in other scopes.
    """

    block: Block
    scopes: tuple[tuple[str | None, bool], ...] = ()


# How often a device sends its share of each buffer, (n-1)/n of it, in a ring of n devices.
_ROUNDS = {
    "all-reduce": 2, "reduce-scatter": 1, "all-gather": 1, "all-to-all": 1, "ragged-all-to-all": 1,
}  # fmt: skip


def wire_bytes(collective: Collective, group_size: int, num_devices: int = 0) -> int:
    """Return the bytes that one device sends when the collective runs as a ring.

    The ring has `group_size` devices. A size of 0 (unknown) gives the limit of a large group, an
    upper bound. For a permute in which not all of `num_devices` (0: unknown) take part, the result
    is the mean over the devices.
    """
    nbytes, name = collective.nbytes, collective.name
    if name == "collective-permute" and collective.groups is not None and num_devices:
        senders = sum(source != target for source, target in collective.groups)
        return nbytes * senders // num_devices
    if name == "recv":
        return 0  # its partner, the send, is counted
    # The operand of a send that gathers is this device's shard, not the whole buffer.
    if collective.pattern == "all-gather":
        return nbytes * max(group_size - 1, 1)
    rounds = _ROUNDS.get(collective.pattern or name)
    if rounds is None:
        return nbytes
    return rounds * nbytes * (group_size - 1) // group_size if group_size else rounds * nbytes


# An asynchronous X is written as X-start with all that X has, X-update and X-done; these may repeat
# it. Every X that calls something counts, but not the many copies and slices.
_INTERESTING = re.compile(
    rf"[ )](?:(?:{'|'.join(COLLECTIVES)}|call|fusion|custom-call|conditional|while)(?:-start)?"
    r"|[\w-]+-start(?=\(.*\b(?:calls|to_apply|called_computations)=))\("
)
# Transfers between TPU slices, which the compiler writes as send and recv of its runtime.
_TARGET = re.compile(r'_xla_megascale_target=("[^"]*"|\{\{.*?\}\}|\{\})')
_TRANSFER_TYPE = re.compile(r'_xla_megascale_transfer_type="?(\w+)')
_PAIRS = re.compile(r'_xla_send_recv_source_target_pairs="?(\{\{.*?\}\})')
_CHAIN = re.compile("AsyncCollectiveStart")
_PER_SLICE = 100_000  # a device is numbered slice * 100000 + place in the slice, slices from 1


def read_collectives(
    module: HloModule, compiled: bool, num_devices: int = 0, slice_major: bool = True
) -> ProgramCollectives:
    """Return the collectives of an HLO module as a tree, seen from its entry computation.

    Args:
      module: a compiled program, or one that was only converted to HLO.
      compiled: which of the two. Only a program that was not compiled has the scopes of all that
        was traced. Compilers insert collectives without a scope (TPU rewrites a reduce-scatter of a
        vector to an all-reduce). If the rest of their branch belongs to one phase, so do they; if
        nothing in it has a scope (seen in programs for several slices) they are merely conditional.
      num_devices: size of the mesh. A program for several TPU slices is written for one slice;
        its groups are repeated for the others if slices come first in the mesh (`slice_major`).
      slice_major: whether slices come first in the mesh.
    """
    num_slices = max(1, num_devices // module.num_devices)
    slices = _Slices(module.num_devices, num_slices, slice_major or num_slices == 1)
    pattern = _INTERESTING if compiled else re.compile(f"{_INTERESTING.pattern}|{PHASE}")
    phases: dict[tuple[str | None, bool], None] = {}  # in order, without duplicates

    @cache
    def read_computation(name: str, caller: Scopes, conditional: bool) -> Block:
        """Return what a computation holds; a called one has the scopes of its caller."""
        within = module.computations[name]
        select = within.select(pattern)
        blocks = (read_instruction(op, within, caller, conditional) for op in select)
        return tuple(node for nodes in blocks for node in nodes)

    def read_instruction(
        op: Instruction, within: Computation, caller: Scopes, conditional: bool
    ) -> Block:
        if op.opcode.endswith(("-update", "-done")):
            return ()
        path = parse_scope(op.attributes)
        own_phase, own = parse_phase(path), Scopes.parse(path, caller)
        # The parameter of a branch has the scope of the value outside that it stands for.
        if own_phase is not None and not compiled and op.opcode != "parameter":
            phases[own_phase, conditional] = None
        opcode = op.opcode.removesuffix("-start")
        if opcode in COLLECTIVES:
            read = _transfer if opcode in ("send", "recv") else _collective
            collective = read(op, opcode, within, slices)
            if collective is None:
                return ()
            phases[own.phase, conditional] = None
            return (collective._replace(scopes=own),)
        if opcode == "conditional":
            inserted = {x: module.computations[x].only_phase() for x in op.callees if compiled}
            blocks = tuple(
                read_computation(x, own._replace(phase=inserted.get(x) or own.phase), True)
                for x in op.callees
            )
            return (Branches(blocks),) if any(blocks) else ()
        block = tuple(x for name in op.callees for x in read_computation(name, own, conditional))
        if opcode == "while":
            return (Loop(block, trip_count(op, within, module)),) if block else ()
        return block

    return ProgramCollectives(read_computation(module.entry, Scopes(), False), tuple(phases))


class _Slices(NamedTuple):
    """The TPU slices that run a program, which is written for one of them."""

    size: int
    count: int
    readable: bool  # whether the mesh numbers devices as the program does

    def repeat_groups(self, groups: Groups) -> Groups:
        """Return the groups of one slice repeated for all slices."""
        if self.count > 1 and groups is not None:
            groups = groups or (tuple(range(self.size)),)
            starts = range(0, self.size * self.count, self.size)
            groups = tuple(tuple(start + i for i in x) for start in starts for x in groups)
        return groups if self.readable else None


def _collective(
    op: Instruction, name: str, within: Computation, slices: _Slices
) -> Collective | None:
    if "chain_id=" in op.attributes and not any(map(_CHAIN.search, within.lines.values())):
        # TPU spreads one asynchronous collective over the fusions it runs beside and repeats the
        # instruction in each; only the one beside AsyncCollectiveStart begins a transfer.
        return None
    pairs = name == "collective-permute"
    key = "source_target_pairs=" if pairs else "replica_groups="
    groups = slices.repeat_groups(parse_groups(op.attributes.partition(key)[2] or "{}"))
    operands = op.operands
    if name == "ragged-all-to-all" or ", slice_sizes=" in op.attributes:
        operands = operands[:1]  # the others are the output buffer and offsets
    arrays = [shape for x in operands for shape in shapes(within.instruction(x).type)]
    nbytes = sum(size for _, size in arrays)
    if name == "all-gather":
        nbytes *= max(map(len, groups or ()), default=0) or slices.size
    if name == "all-reduce" and _is_fused_reduce_scatter(op.name, within):
        name = "reduce-scatter"
    return Collective(name, groups, nbytes, tuple(sorted({x for x, _ in arrays})), pairs=pairs)


def _transfer(
    op: Instruction, name: str, within: Computation, slices: _Slices
) -> Collective | None:
    """Return a send or recv between TPU slices or devices; one to the host is not counted."""
    pairs, groups = True, None
    if target := _TARGET.search(op.attributes):
        groups, pairs = parse_target(target[1], slices.size)
        groups = groups if slices.readable else None
    elif match := _PAIRS.search(op.attributes):
        groups = slices.repeat_groups(parse_groups(match[1]))
    elif ", is_host_transfer=true" in op.attributes:
        return None
    # A recv has no operand but a token; its result is (data, context, token).
    source = within.instruction(op.operands[0]).type if name == "send" else op.type
    (dtype, nbytes), *_ = shapes(source) or [("token", 0)]
    match = _TRANSFER_TYPE.search(op.attributes)
    pattern = match[1].lower().replace("_", "-") if match else ""
    return Collective(name, groups, nbytes, (dtype,), pairs=pairs, pattern=pattern)


def _is_fused_reduce_scatter(name: str, within: Computation) -> bool:
    """Return whether a computation is TPU's fused reduce-scatter, an all-reduce and a slice of it.

    Outside a fusion the same pair of instructions does move the whole buffer to everybody.
    """
    if not within.name.startswith("all-reduce-scatter"):
        return False
    root = within.instruction(within.root)
    return root.opcode == "dynamic-slice" and root.operands[0] == name


def parse_target(text: str, per_slice: int) -> tuple[Groups, bool]:
    """Return the devices that a transfer connects, numbered as in a mesh whose slices come first.

    Args:
      text: `"{1,2}x{0:7}"` (the devices of the same place in each slice), `{{100000,200000},...}`
        (groups) or `{{100000->200000},...}` (pairs).
      per_slice: number of devices of one slice.

    Returns:
      (groups, whether they are pairs); groups are None if the text has another form.

    >>> parse_target('"{1,2}x{0:1}"', 2)
    (((0, 2), (1, 3)), False)
    """
    if product := re.fullmatch(r"\{([^{}]*)\}x\{([^{}]*)\}", text.strip('"')):
        slices, places = (_numbers(part) for part in product.groups())
        return tuple(tuple((s - 1) * per_slice + p for s in slices) for p in places), False
    groups = [re.findall(r"\d+", group) for group in re.findall(r"\{([\d,>\s-]+)\}", text)]
    logical = tuple(tuple(_logical(int(i), per_slice) for i in group) for group in groups)
    return logical or None, "->" in text


def _logical(device: int, per_slice: int) -> int:
    return (device // _PER_SLICE - 1) * per_slice + device % _PER_SLICE


def _numbers(text: str) -> list[int]:
    """Return the numbers of a text such as `0:2,5`: [0, 1, 2, 5]."""
    ranges = (part.partition(":") for part in text.split(","))
    return [i for first, _, last in ranges for i in range(int(first), int(last or first) + 1)]
