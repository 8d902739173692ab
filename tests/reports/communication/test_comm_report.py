"""Counts and bytes of real programs, emitted and compiled on eight CPU devices."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.reports.communication import CommReport, comm_report, comm_report_of

ROWS = jax.ShapeDtypeStruct((64, 16), jnp.float32)
BLOCK = 8 * 16 * 4  # bytes of one device's share of ROWS


def mapped(fn, mesh, *, outs=None, check_vma=False, inputs=1):
    spec = P(mesh.axis_names)
    outs = spec if outs is None else outs
    return jax.shard_map(
        fn, mesh=mesh, in_specs=(spec,) * inputs, out_specs=outs, check_vma=check_vma
    )


CASES = {
    "all-reduce": (lambda x, a: lax.psum(x, a), BLOCK, 2),
    "reduce-scatter": (lambda x, a: lax.psum_scatter(x, a, tiled=True), BLOCK, 1),
    "all-gather": (lambda x, a: lax.all_gather(x, a, tiled=True), None, 1),
    "all-to-all": (lambda x, a: lax.all_to_all(x, a, 0, 1, tiled=True), BLOCK, 1),
}


@pytest.mark.parametrize("level", ["emitted", "compiled"])
@pytest.mark.parametrize("axes", ["replica", "device", ("replica", "device")])
@pytest.mark.parametrize("name", CASES)
def test_collectives_over_axes_of_a_mesh(mesh_of, name, axes, level):
    mesh = mesh_of({"replica": 2, "device": 4})
    collective, nbytes, ring = CASES[name]
    size = {"replica": 2, "device": 4}.get(axes, 8)
    nbytes = nbytes or BLOCK * size  # the whole result of a gather
    report = comm_report(mapped(lambda x: collective(x, axes), mesh), ROWS)

    (row,) = report.select(level=level)
    expected = axes if isinstance(axes, str) else ",".join(axes)
    assert (row.kind, row.axis, row.collective) == ("every", expected, name)
    assert (row.count, row.bytes, row.group_size) == (1, nbytes, size)
    assert row.wire_bytes == ring * nbytes * (size - 1) // size
    assert row.dtypes == ("float32",)
    assert (row.conditional, row.in_loop, row.trip_count) == (False, False, 1)
    assert report.axes[:2] == ("replica", "device")


@pytest.mark.parametrize("level", ["emitted", "compiled"])
def test_permutes_whole_partial_and_onto_oneself(mesh_of, level):
    mesh = mesh_of({"replica": 4, "device": 2})

    def step(x):
        x = lax.ppermute(x, "replica", [(i, (i + 1) % 4) for i in range(4)])
        x = lax.ppermute(x, "device", [(0, 1)])
        return lax.ppermute(x, "replica", [(i, i) for i in range(4)])

    report = comm_report(mapped(step, mesh), ROWS)
    found = [(r.axis, r.count, r.bytes, r.wire_bytes) for r in report.select(level=level)]
    # Half of the devices along "device" send: the mean is half a block.
    assert found == [("replica", 1, BLOCK, BLOCK), ("device", 1, BLOCK, BLOCK // 2)]


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("check_vma", [False, True])
def test_vma_modes_and_axis_types(mesh_of, check_vma, explicit):
    mesh = mesh_of({"replica": 8}, explicit=explicit)
    fn = mapped(lambda x: lax.pmean(x, "replica"), mesh, outs=P(), check_vma=check_vma)
    x = jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype, sharding=NamedSharding(mesh, P("replica")))
    for given in (fn, jax.jit(fn)):
        report = comm_report(given, x)
        assert report.count(axis="replica", collective="all-reduce") == 1
        assert report.bytes(level="compiled") == BLOCK


def test_arrays_are_neither_used_up_nor_run(mesh_of):
    mesh = mesh_of({"replica": 8})
    fn = jax.jit(mapped(lambda x: lax.ppermute(x, "replica", [(0, 1)]), mesh), donate_argnums=0)
    x = jax.device_put(jnp.ones(ROWS.shape), NamedSharding(mesh, P("replica")))
    assert comm_report(fn, x).count() == 1
    assert not x.is_deleted()


def test_keyword_arguments(mesh_of):
    mesh = mesh_of({"replica": 8})
    step = mapped(lambda x, y: lax.psum(x, "replica") + y, mesh, inputs=2)
    assert comm_report(lambda x, *, y: step(x, y), ROWS, y=ROWS).count() == 1


def test_pmap():
    fn = jax.pmap(lambda x: lax.psum(x, "i"), axis_name="i")
    report = comm_report(fn, jax.ShapeDtypeStruct((8, 16), jnp.float32))
    assert report.count(axis="i") == report.count(axis="i", level="compiled") == 1
    assert report.bytes(axis="i") == 64


def test_axes_of_size_one_move_nothing(mesh_of):
    mesh = mesh_of({"one": 1, "replica": 8})

    def step(x):
        return lax.psum(lax.psum(x, "one"), ("one", "replica"))

    report = comm_report(mapped(step, mesh), ROWS)
    assert report.count(axis="one") == 0
    assert [row.axis for row in report.select(level="emitted")] == ["replica"]
    assert report.axes == ("one", "replica")


def test_groups_within_an_axis_are_reported_as_unknown(mesh_of):
    mesh = mesh_of({"replica": 8})
    groups = [[0, 1], [2, 3], [4, 5], [6, 7]]
    fn = mapped(lambda x: lax.psum(x, "replica", axis_index_groups=groups), mesh)
    report = comm_report(fn, ROWS)
    (row,) = report.select(level="emitted")
    assert (row.axis, row.group_size, row.wire_bytes) == ("?", 2, BLOCK)
    assert report.axes == ("replica", "?")
    assert report.count(axis="?") == 1


def test_compiler_merges_what_the_program_emits_apart(mesh_of):
    mesh = mesh_of({"replica": 8})

    def step(x):
        return [lax.psum(x * i, "replica") for i in range(1, 7)]

    report = comm_report(mapped(step, mesh), ROWS)
    assert report.count() == 6
    assert report.count(level="compiled") == 1
    assert report.bytes() == report.bytes(level="compiled") == 6 * BLOCK


def test_bfloat16_is_emitted_as_such(mesh_of):
    mesh = mesh_of({"replica": 8})
    x = jax.ShapeDtypeStruct((64, 16), jnp.bfloat16)
    report = comm_report(mapped(lambda x: lax.psum(x, "replica"), mesh), x)
    (row,) = report.select(level="emitted")
    assert (row.dtypes, row.bytes) == (("bfloat16",), BLOCK // 2)


def test_collectives_of_automatic_axes_are_only_compiled(mesh_of):
    mesh = mesh_of({"replica": 2, "fsdp": 4})
    weights = jax.ShapeDtypeStruct(
        (64, 64), jnp.float32, sharding=NamedSharding(mesh, P("fsdp", None))
    )
    batch = jax.ShapeDtypeStruct(
        (16, 64), jnp.float32, sharding=NamedSharding(mesh, P(("replica", "fsdp")))
    )

    def grad(w, x):
        return jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)

    report = comm_report(jax.jit(grad, out_shardings=weights.sharding), weights, batch)
    assert report.count() == 0
    assert report.count(axis="fsdp", collective="all-gather", level="compiled") >= 1
    assert report.bytes(axis="fsdp", collective="all-gather", level="compiled") >= 64 * 64 * 4
    assert report.axes[:2] == ("replica", "fsdp")


def test_automatic_axis_inside_a_manual_one(mesh_of):
    mesh = mesh_of({"replica": 2, "fsdp": 4})
    fn = jax.shard_map(
        lambda w: lax.pmean(w, "replica"),
        mesh=mesh,
        in_specs=P("replica"),
        out_specs=P(),
        axis_names={"replica"},
        check_vma=False,
    )
    w = jax.ShapeDtypeStruct(
        (64, 32), jnp.float32, sharding=NamedSharding(mesh, P("replica", "fsdp"))
    )
    report = comm_report(fn, w)
    assert report.bytes(axis="replica") == 32 * 32 * 4  # the block of a replica
    assert report.bytes(axis="replica", level="compiled") == 32 * 8 * 4  # of a device
    assert report.count(axis="fsdp", level="compiled") == 0


@pytest.mark.parametrize("level", ["emitted", "compiled"])
def test_scan_multiplies(mesh_of, level):
    mesh = mesh_of({"replica": 8})
    shift = [(i, (i + 1) % 8) for i in range(8)]

    def step(x):
        def inner(c, _):
            return lax.ppermute(jnp.sin(c), "replica", shift), None

        def outer(c, _):
            return lax.scan(inner, c, None, length=3)[0], None

        return lax.scan(outer, x, None, length=5)[0]

    report = comm_report(mapped(step, mesh), ROWS)
    (row,) = report.select(level=level)
    assert (row.count, row.bytes, row.in_loop, row.trip_count) == (15, 15 * BLOCK, True, 15)


@pytest.mark.parametrize("level", ["emitted", "compiled"])
def test_loop_of_unknown_length_counts_once(mesh_of, level):
    mesh = mesh_of({"replica": 8})

    def step(x):
        return lax.while_loop(lambda x: x.sum() > 1, lambda x: lax.psum(x, "replica") / 9, x)

    report = comm_report(mapped(step, mesh), ROWS)
    (row,) = report.select(level=level)
    assert (row.count, row.bytes, row.in_loop, row.trip_count) == (1, BLOCK, True, None)
    assert "unknown length" in str(report)


def test_functions_called_twice_count_twice(mesh_of):
    mesh = mesh_of({"replica": 8})
    shared = jax.jit(lambda x: lax.psum(x, "replica"))
    report = comm_report(mapped(lambda x: shared(jnp.sin(shared(x))), mesh), ROWS)
    assert report.count() == report.count(level="compiled") == 2


def test_without_shardy_the_mesh_comes_from_the_jaxpr(mesh_of):
    mesh = mesh_of({"replica": 2, "device": 4})

    def step(x, t):
        return lax.cond(t.sum() > 0, lambda x: lax.psum(x, "replica"), lambda x: x, x)

    previous = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        report = comm_report(jax.jit(mapped(step, mesh, inputs=2)), ROWS, ROWS)
    finally:
        jax.config.update("jax_use_shardy_partitioner", previous)
    assert report.axes == ("replica", "device")
    assert report.count(axis="replica", kind="conditional") == 1


def test_abstract_mesh_is_not_compiled():
    mesh = AbstractMesh((16,), ("replica",), axis_types=(AxisType.Auto,))
    report = comm_report(mapped(lambda x: lax.psum(x, "replica"), mesh), ROWS)
    assert report.levels == ("emitted",)
    assert report.bytes(axis="replica") == BLOCK // 2
    with pytest.raises(ValueError, match="without compiling"):
        report.count(level="compiled")


def test_comm_report_of_lowered_programs(mesh_of):
    mesh = mesh_of({"replica": 8})
    lowered = jax.jit(mapped(lambda x: lax.psum(x, "replica"), mesh)).lower(ROWS)
    silent = jax.jit(mapped(lambda x: 2 * x, mesh)).lower(ROWS)
    assert comm_report_of(lowered).count(axis="replica", level="compiled") == 1
    report = comm_report_of({"average": lowered, "local": silent}, mesh=mesh, compile=False)
    assert report.kinds == ("average", "local")
    assert report.levels == ("emitted",)
    assert report.count(kind="average", axis="replica") == 1
    assert report.count(kind="local", axis="replica") == 0


def exchanges(mesh):
    """A program that exchanges in a phase, and otherwise: lowered."""

    def step(x, t):
        x = lax.psum(x, "device")

        def slow(x):
            with jax.named_scope("phase:slow"):
                return lax.psum(x, "replica")

        return lax.cond(t.sum() > 0, slow, lambda x: x, x)

    return jax.jit(mapped(step, mesh, inputs=2)).lower(ROWS, ROWS)


def of_level(report, level):
    return [row for row in report.rows if row.level == level]


@pytest.mark.parametrize("named", [False, True])
def test_comm_report_of_a_compiled_program(mesh_of, named):
    mesh = mesh_of({"replica": 2, "device": 4})
    lowered = exchanges(mesh)
    both = comm_report_of(lowered)
    report = comm_report_of(lowered.compile(), mesh=mesh if named else None, compile=named)
    assert report.levels == ("compiled",)
    assert report.kinds == both.kinds == ("local", "slow")
    assert report.axes == both.axes == ("replica", "device")
    assert list(report.rows) == of_level(both, "compiled") != []
    assert report.count(kind="slow", axis="replica", level="compiled") == 1
    assert report.count(kind="local", axis="replica", level="compiled") == 0
    assert "slow" in str(report)
    with pytest.raises(ValueError, match=r"`level` is 'emitted', but .*ask for level=\"compiled\""):
        report.count(kind="slow")


def test_comm_report_of_compiled_programs_by_kind(mesh_of):
    mesh = mesh_of({"replica": 8})
    lowered = jax.jit(mapped(lambda x: lax.psum(x, "replica"), mesh)).lower(ROWS)
    silent = jax.jit(mapped(lambda x: 2 * x, mesh)).lower(ROWS)
    report = comm_report_of({"average": lowered.compile(), "local": silent.compile()})
    assert report.kinds == ("average", "local")
    assert report.levels == ("compiled",)
    assert report.bytes(kind="average", axis="replica", level="compiled") == BLOCK
    assert report.count(kind="local", axis="replica", level="compiled") == 0


@pytest.mark.parametrize("mode", ["traced", "host"])
def test_comm_report_of_a_compiled_train_step(mesh_of, mode):
    mesh = mesh_of({"replica": 4})
    step = js.make_train_step(
        lambda params, batch: jnp.mean((batch @ params["w"]) ** 2),
        optax.sgd(0.1),
        sync=js.local_sgd("replica", sync_every=2),
        mesh=mesh,
        mode=mode,
    )
    state, batch = step.init({"w": jnp.ones(16)}), jnp.ones((8, 16))
    local = comm_report_of(step.compiled(state, batch))
    if mode == "traced":
        assert local.kinds == ("local", "average")
        assert local.bytes(kind="average", axis="replica", level="compiled") == 64
        assert local.count(kind="local", level="compiled") == 0
        return
    assert (local.kinds, local.rows) == (("every",), ())
    state, _ = step(state, batch)
    by_phase = {"average": step.compiled(state, batch)}
    report = comm_report_of(by_phase)
    assert report.bytes(kind="average", axis="replica", level="compiled") == 64


def test_comm_report_of_refuses_what_is_no_program(mesh_of):
    mesh = mesh_of({"replica": 8})
    fn = jax.jit(mapped(lambda x: 2 * x, mesh))
    lowered = fn.lower(ROWS)
    assert comm_report_of(fn.trace(ROWS)).levels == ("emitted", "compiled")
    for wrong, message in (
        ("step", r"`lowered` must be a jax\.stages\.Lowered, Traced or Compiled, .*got str\."),
        (fn, r"`lowered` must be .*, got PjitFunction\."),
        ({"slow": lowered, "local": None}, r"`lowered` must be .*, got NoneType under 'local'\."),
    ):
        with pytest.raises(TypeError, match=message):
            comm_report_of(wrong)
    with pytest.raises(ValueError, match="`lowered` must hold at least one program"):
        comm_report_of({})
    with pytest.raises(ValueError, match=r"got \['slow'\] compiled and \['local'\] not"):
        comm_report_of({"slow": lowered.compile(), "local": lowered})


def test_one_device_program_has_no_rows():
    report = comm_report(lambda x: x @ x.T, ROWS)
    assert isinstance(report, CommReport)
    assert (report.rows, report.kinds, report.axes) == ((), ("every",), ())


def test_refuses_what_cannot_be_lowered():
    with pytest.raises(TypeError, match=r"`fn` must be a function.*got str"):
        comm_report("step", ROWS)
