"""16 bits stay 16 bits where a TPU compiler made the program (one for CPUs widens bfloat16)."""

import jax
import jax.numpy as jnp
import pytest

import jaxslowmo as js
from support.described import report_of_sync
from support.tpu_slices import tpu_mesh

PARAMS = {
    "matrix": jax.ShapeDtypeStruct((256, 512), jnp.float32),
    "vector": jax.ShapeDtypeStruct((3000,), jnp.float32),
}
NUM_BYTES = 2 * (256 * 512 + 3000)
BFLOAT16 = js.codecs.bfloat16(error_feedback=True)
CASES = {
    "average": js.local_sgd("replica", sync_every=2, codec=BFLOAT16),
    "round 0": js.sgp("replica", graph=js.topology.ring(8), codec=js.codecs.float16()),
    "slow": js.diloco("replica", sync_every=2, codec=BFLOAT16),
}


@pytest.mark.parametrize("event", CASES)
def test_a_compiled_exchange_is_in_16_bits(event):
    sync = CASES[event]
    mesh = tpu_mesh("v5e:2x4", {"replica": 8})
    report = report_of_sync(sync, PARAMS, mesh, (event,))
    (row,) = report.select(axis="replica", level="compiled")
    assert row.count == 1
    assert row.dtypes in [("bfloat16",), ("float16",)]
    assert NUM_BYTES <= row.bytes <= 1.01 * NUM_BYTES
