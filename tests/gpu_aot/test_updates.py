"""What hooks and codecs send where XLA compiled for GPUs: their dtype and bytes, as stated."""

from support.gpu_programs import GRADIENTS, NUM_GRADIENTS, RANK, REPLICAS, each_of, program, report

SIXTEEN_BITS = {
    "hook bf16_compress": ("all-reduce", "bfloat16"),
    "hook fp16_compress": ("all-reduce", "float16"),
    "codec, average": ("all-reduce", "bfloat16"),
    "codec, round 0": ("collective-permute", "float16"),
}
# Least and largest share of the bytes of an all-reduce in float32.
FEW_BITS = {
    "hook int8": (0.25, 0.26),
    "hook fp8": (0.25, 0.26),
    "codec, int8, sharded": (0.25, 0.27),
    "codec, int4": (0.13, 0.14),
}


@each_of(*SIXTEEN_BITS)
def test_16_bits_stay_16_bits(name):
    (row,) = program(name).facts.rows
    assert (row.collective, row.dtypes) == (SIXTEEN_BITS[name][0], (SIXTEEN_BITS[name][1],))
    assert (row.axis, row.count, row.bytes) == ("replica", 1, 2 * NUM_GRADIENTS)


@each_of(*FEW_BITS)
def test_bytes_stay_bytes(name):
    """The codes and the scales."""
    rows = program(name).facts.rows
    assert [row.collective for row in rows] == ["all-to-all", "all-gather"]
    assert all(row.dtypes == ("uint8",) for row in rows)
    plain = 2 * 4 * NUM_GRADIENTS * (REPLICAS - 1) // REPLICAS
    least, most = FEW_BITS[name]
    assert least * plain <= sum(row.wire_bytes for row in rows) <= most * plain


@each_of("hook powersgd")
def test_powersgd_sends_two_factors_of_a_matrix(name):
    """And the vector, which it does not compress; in warm-up all gradients, each once."""
    factors = RANK * sum(GRADIENTS["matrix"].shape)
    vectors = GRADIENTS["vector"].size
    for kind, elements in {"powersgd": factors + vectors, "warm_up": NUM_GRADIENTS}.items():
        (row,) = report(name, kind=kind)
        assert (row.collective, row.dtypes, row.conditional) == ("all-reduce", ("float32",), True)
        assert row.bytes == 4 * elements
        assert row.count <= {"powersgd": 3, "warm_up": 1}[kind]
    assert program(name).facts.schedule.transfers == ()  # all of it is in branches
