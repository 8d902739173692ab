"""Numbers as people read them."""

import math


def format_bytes(count: float) -> str:
    """Decimal units, three digits: 0 B, 999 B, 1.50 MB."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"))


def format_count(count: float) -> str:
    """Three digits and a letter: 999, 1.07M."""
    return _scaled(count, ("", "k", "M", "G", "T")).replace(" ", "")


def format_loss(loss: float | None) -> str:
    """Three decimals, or a dash where there is none."""
    return "-" if loss is None or not math.isfinite(loss) else f"{loss:.3f}"


def format_limit(limit: int) -> str:
    """A limit of bytes as users write it: 0, 1.5 MiB, 4,000 B."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if limit >= size and limit * 100 % size == 0:
            return f"{limit / size:g} {unit}"
    return f"{limit:,} B" if limit else "0"


def _scaled(count: float, units: tuple[str, ...]) -> str:
    step = 0
    # 999.5 and more would print as 1e+03.
    while count >= 999.5 and step < len(units) - 1:
        count, step = count / 1000, step + 1
    digits = 0 if step == 0 or count >= 99.95 else 1 if count >= 9.995 else 2
    return f"{count:.{digits}f} {units[step]}"
