"""Steps of a torch module compiled for a TPU slice, without a TPU: what they send there."""

import jax
import jax.numpy as jnp
import models
import optax
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.described import compiled_rows, shapes_on
from support.tpu_slices import tpu_mesh
from torch_compat import on_jax


def test_local_steps_are_silent_and_averages_send_the_model():
    mesh = tpu_mesh("v5e:2x2", {"replica": 4})
    module = models.Convolutions()
    loss_fn, params, model_state = on_jax.as_loss(module, models.loss)

    def step_on(where):
        sync = js.local_sgd("replica", sync_every=2)
        return js.make_train_step(loss_fn, optax.sgd(0.1), sync=sync, mesh=where, mode="host")

    start = step_on(js.virtual_mesh({"replica": 4})).init
    state = shapes_on(
        jax.eval_shape(lambda: start(params, model_state=model_state)), mesh, P("replica")
    )
    batch = {
        "x": jax.ShapeDtypeStruct((16, 3, 5, 5), jnp.float32),
        "y": jax.ShapeDtypeStruct((16,), jnp.int32),
    }
    programs = step_on(mesh).traced_by_phase(state, batch)
    sent = {}
    for kind, traced in programs.items():
        lowered = traced.lower()
        rows = compiled_rows(kind, lowered, lowered.compile(), mesh)
        sent[kind] = {row.collective: row.bytes for row in rows if row.bytes}
    floating = [x for x in models.held(module).values() if x.dtype == "float32"]
    assert sent == {"local": {}, "average": {"all-reduce": sum(x.nbytes for x in floating)}}
