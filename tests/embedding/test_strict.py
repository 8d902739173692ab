"""Tables under jax's debugging settings, and inside of `jax.set_mesh`."""

import jaxslowmo as js
from support.strict import SETTINGS, assert_equal_bits
from train.step.tables import DENSE, OWN, batches, embeddings, step_of


def program(mesh):
    """Train tables that devices share, one step ahead and by hand; return what came of it."""
    gradients, tables = js.all_reduce_gradients("replica"), embeddings("table", own=OWN)
    step = step_of(2, mesh=mesh, gradients=gradients, embeddings=tables)
    drawn = step.embeddings.read(step.consensus(step.init(DENSE)).tables)
    state = step.init(js.embedding.WithTables(DENSE, step.embeddings.write(drawn)))
    *most, last = batches(4)
    for result in js.TrainPipeline(step, state, iter(most)):
        state = result.state
    state, metrics = step(state, last)
    step.refuse_ids()
    consensus = step.consensus(state)
    return metrics, step.embeddings.read(consensus.tables), consensus.dense


def test_tables_train_alike():
    mesh = js.make_mesh({"replica": 2, "shard": 2})
    expected = program(mesh)
    with SETTINGS["set_mesh"](mesh), SETTINGS["checks"](mesh):
        assert_equal_bits(program(mesh), expected)
