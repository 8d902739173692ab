"""Programs walked through, traced flat, and done in part."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxslowmo.tracing import equations_in, flattened, has_side_effects, interpret, run

X = jax.ShapeDtypeStruct((3,), jnp.float32)


@jax.checkpoint
def inner(x):
    return jax.jit(jnp.sin)(x) * 2.0


def names(equations):
    return [equation.primitive.name for equation in equations]


def test_calls_are_opened_but_those_that_place_their_result():
    flat = flattened(lambda x: [inner(x) + 1.0], [X])
    assert names(flat.equations) == ["sin", "mul", "add"]
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    flat = flattened(lambda x: [jax.jit(jnp.sin, out_shardings=placed)(x)], [X])
    assert names(flat.equations) == ["jit"]
    flat = flattened(lambda x: [jax.jit(jax.named_scope("here")(jnp.sin))(x)], [X])
    assert "here" in str(flat.equations[0].source_info.name_stack)


def test_a_part_is_done_from_known_values_and_with_results_instead():
    flat = flattened(lambda x: [jnp.cos(jnp.sin(x)) * 2.0], [X])
    first, *rest = flat.equations
    known = {first.outvars[0]: jnp.arange(3.0)}
    expected = jnp.cos(jnp.arange(3.0)) * 2.0
    np.testing.assert_array_equal(run(rest, flat.outputs, known)[0], expected)

    def instead(equation, operands):
        return [jnp.arange(3.0)] if equation is first else None

    values = run(flat.equations, flat.outputs, {flat.inputs[0]: jnp.ones(3)}, instead)
    np.testing.assert_array_equal(values[0], expected)


def test_equations_inside_come_after_the_one_that_holds_them():
    program = jax.make_jaxpr(lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x))(X)
    found = names(equations_in(program))
    assert found.index("cond") < min(found.index("sin"), found.index("cos"))


def test_a_program_is_interpreted_with_values_of_another_kind():
    program = jax.make_jaxpr(lambda x: (x * 2.0, x + x))(jnp.float32(1))

    def equation(eqn, operands):
        return [f"{eqn.primitive.name}({', '.join(operands)})"]

    found = interpret(program, ["x"], equation, lambda constant: str(float(constant)))
    assert found == ["mul(x, 2.0)", "add(x, x)"]


def test_what_prints_has_side_effects():
    def loud(x):
        jax.debug.print("{}", x[0])
        return [jnp.sin(x)]

    flat = flattened(loud, [X])
    assert any(map(has_side_effects, flat.equations))
    assert not any(map(has_side_effects, flattened(lambda x: [inner(x)], [X]).equations))
