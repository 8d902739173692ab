"""What hooks and codecs send where XLA compiled for GPUs: their dtype and bytes, as stated."""

from support.gpu_programs import GRADIENTS, NUM_GRADIENTS, RANK, REPLICAS, each_of, program, report

SIXTEEN_BITS = {
    "hook bf16_compress": ("all-reduce", "bfloat16"),
    "hook fp16_compress": ("all-reduce", "float16"),
    "codec, average": ("all-reduce", "bfloat16"),
    "codec, round 0": ("collective-permute", "float16"),
    "codec, slow": ("all-reduce", "bfloat16"),
}
EIGHT_BITS = ("hook int8", "hook fp8")


@each_of(*SIXTEEN_BITS)
def test_16_bits_stay_16_bits(name):
    (row,) = program(name).facts.rows
    assert (row.collective, row.dtypes) == (SIXTEEN_BITS[name][0], (SIXTEEN_BITS[name][1],))
    assert (row.axis, row.count, row.bytes) == ("replica", 1, 2 * NUM_GRADIENTS)


@each_of(*EIGHT_BITS)
def test_bytes_stay_bytes(name):
    """A quarter of the bytes of an all-reduce in float32, and the scales."""
    rows = program(name).facts.rows
    assert [row.collective for row in rows] == ["all-to-all", "all-gather"]
    assert all(row.dtypes == ("uint8",) for row in rows)
    plain = 2 * 4 * NUM_GRADIENTS * (REPLICAS - 1) // REPLICAS
    assert 0.25 * plain <= sum(row.wire_bytes for row in rows) <= 0.26 * plain


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
