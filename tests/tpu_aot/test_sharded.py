"""Steps of sharded replicas as the TPU compiler makes them; `docs/tpu.md` has larger models.

Nothing runs here.
"""

import dataclasses

import pytest

from jaxslowmo.models import GPTConfig
from support.tpu_sharded import SlicesSharded, facts

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.xdist_group("sharded on v5e:2x4"),
]

MODEL = GPTConfig(
    num_layers=1,
    num_heads=2,
    embed_dim=256,
    context_length=64,
    dtype="bfloat16",
    remat=True,
    qkv_by_head=True,
)
CASE = SlicesSharded(MODEL, "v5e:2x4", (("replica", 2), ("fsdp", 2), ("tensor", 2)))
PADDING = 1.01  # a shard's, besides the 8 KiB of small ones


def test_a_slow_step_sends_a_chip_s_part_between_replicas_and_a_local_one_nothing():
    local, slow = (facts(CASE, kind) for kind in ("local", "slow"))
    assert not [axis for axis in local.sent if "replica" in axis]
    wanted = CASE.between_replicas()
    assert wanted <= slow.sent["replica"] <= PADDING * wanted + 8 * 8192


def test_no_transform_sends_inside_a_replica():
    """Slow steps move there what local ones do: what the loss needs."""
    local, slow = (facts(CASE, kind) for kind in ("local", "slow"))
    for axis in ("fsdp", "tensor"):
        assert slow.sent[axis] == local.sent[axis] > 0


def test_memory_of_the_slow_state_is_divided_by_replicas_and_shards():
    sharded = facts(CASE, "local").argument_bytes
    assert CASE.argument_bytes() == pytest.approx(sharded, rel=0.01)
    whole = dataclasses.replace(CASE, shard_state=False).argument_bytes()
    state = 2 * 4 * CASE.on_a_device()  # anchor and momentum
    assert whole - CASE.argument_bytes() == pytest.approx(state / 2, rel=0.02)
