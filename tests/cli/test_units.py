"""Numbers as people read them."""

from jaxslowmo.cli._output import format_bytes, format_count, format_limit, format_loss


def test_numbers_have_three_digits():
    assert [format_bytes(n) for n in (0, 999, 1000, 56_463_360, 999_700_000)] == [
        "0 B", "999 B", "1.00 kB", "56.5 MB", "1.00 GB",
    ]  # fmt: skip
    assert [format_count(n) for n in (12, 470_528, 1_073_536)] == ["12", "471k", "1.07M"]
    assert [format_loss(x) for x in (2.4164, None, float("nan"))] == ["2.416", "-", "-"]


def test_limits_have_binary_units():
    shown = ["0", "4 KiB", "1.5 MiB", "25 MiB", "1,000 B", "2 GiB"]
    assert [format_limit(n) for n in (0, 4096, 3 * 2**19, 25 * 2**20, 1000, 2**31)] == shown
