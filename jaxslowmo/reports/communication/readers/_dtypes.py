"""Element types of StableHLO and HLO as the names that users know, with their width."""

_BY_LETTERS = {
    "pred": ("bool", 8),
    "i1": ("bool", 8),
    "bf16": ("bfloat16", 16),
    "c64": ("complex64", 64),
    "c128": ("complex128", 128),
    "complex<f32>": ("complex64", 64),
    "complex<f64>": ("complex128", 128),
    "token": ("token", 0),
}


def dtype_of(element: str) -> tuple[str, int]:
    """Name and width in bits of an element type written as in HLO or StableHLO.

    >>> dtype_of("s32"), dtype_of("ui8"), dtype_of("f8E4M3FN")
    (('int32', 32), ('uint8', 8), ('float8_e4m3fn', 8))
    """
    if element in _BY_LETTERS:
        return _BY_LETTERS[element]
    # Small floats carry their layout behind the width: f8E4M3FN (StableHLO), f8e4m3fn (HLO).
    head, _, layout = element.lower().partition("e")
    letters = head.rstrip("0123456789")
    width = int(head[len(letters) :] or 0)
    kind = {"f": "float", "s": "int", "i": "int", "u": "uint", "ui": "uint"}.get(letters, letters)
    return f"{kind}{width}" + (f"_e{layout}" if layout else ""), width


def num_bytes(element: str, dims: list[int]) -> int:
    """Bytes of a dense array; types narrower than a byte are packed."""
    size = 1
    for dim in dims:
        size *= dim
    return (size * dtype_of(element)[1] + 7) // 8
