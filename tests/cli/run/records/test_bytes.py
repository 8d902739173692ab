"""Bytes of steps whose events no kind holds together."""

from jaxslowmo.cli.run.records._bytes import ByteLedger


def test_bytes_of_events_that_no_kind_holds_together_add_up():
    ledger = ByteLedger({"local": 1, "average": 11, "slow": 101})
    assert [ledger.add(p) for p in ((), ("average",), ("average", "slow"))] == [1, 12, 123]
    assert ByteLedger({"every": 5}).add(()) == 5
    gossip = ByteLedger({"local": 1, "round 0": 11, "round 1": 21})
    assert [gossip.add(p) for p in (("round 0",), ("any round",))] == [11, 32]
    joined = ByteLedger({"local": 0, "average": 10, "slow": 100, "average+slow": 105})
    assert joined.add(("slow", "average")) == 105
