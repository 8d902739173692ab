"""Steps of sharded replicas as the TPU compiler makes them; `tpu_sharded.md` has larger models.

Nothing runs here.
"""

import dataclasses

import pytest

from jaxslowmo.models import GPTConfig
from support.tpu_sharded import SlicesSharded, facts

SIZES = {"num_layers": 1, "num_heads": 2, "embed_dim": 256, "context_length": 64}
MODEL = GPTConfig(**SIZES, dtype="bfloat16", remat=True, qkv_by_head=True)
CASE = SlicesSharded(MODEL, "v5e:2x4", (("replica", 2), ("fsdp", 2), ("tensor", 2)))
PADDING = 1.01  # a shard's, besides the 8 KiB of small ones
# flax's LayerNorm in half precision relies on promotion.
pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.mark.exhaustive
def test_a_slow_step_sends_a_chip_s_part_between_replicas_and_a_local_one_nothing():
    """Inside a replica both move what the loss needs."""
    local, slow = (facts(CASE, kind) for kind in ("local", "slow"))
    assert not [axis for axis in local.sent if "replica" in axis]
    wanted = CASE.between_replicas()
    assert wanted <= slow.sent["replica"] <= PADDING * wanted + 8 * 8192
    for axis in ("fsdp", "tensor"):
        assert slow.sent[axis] == local.sent[axis] > 0
    # Slow state is divided by replicas and shards.
    assert CASE.argument_bytes() == pytest.approx(local.argument_bytes, rel=0.01)
    whole = dataclasses.replace(CASE, shard_state=False).argument_bytes()
    state = 2 * 4 * CASE.on_a_device()  # anchor and momentum
    assert whole - CASE.argument_bytes() == pytest.approx(state / 2, rel=0.02)
