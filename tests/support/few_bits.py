"""Codecs in NumPy, written from their definitions."""

import math

import ml_dtypes
import numpy as np

import jaxslowmo as js


def of(make, *args, **options):
    return lambda error_feedback=True: make(*args, **options, error_feedback=error_feedback)


CODECS = {
    "bfloat16": of(js.codecs.bfloat16),
    "float16": of(js.codecs.float16),
    "int8": of(js.codecs.int8),
    "fp8": of(js.codecs.fp8),
    "e5m2": of(js.codecs.fp8, "e5m2", block=100),
    "int4": of(js.codecs.int4),
    "top_k": of(js.codecs.top_k, 0.02),
    "bits2": of(js.codecs.top_k, 0.1, values="bits2"),
}
SPARSE = ("top_k", "bits2")
_BLOCKS = {"int8": 256, "fp8": 256, "e5m2": 100, "int4": 64}
_LARGEST = {"int8": 127, "fp8": 448, "e5m2": 57344, "int4": 7}


def decoded(name: str, row: np.ndarray) -> np.ndarray:
    """Return what a float32 row is after it was sent."""
    if name in ("bfloat16", "float16"):
        kind = getattr(ml_dtypes, name, np.float16)
        largest = float(ml_dtypes.finfo(kind).max)
        return np.float32(np.clip(row, -largest, largest).astype(kind))
    if name in _BLOCKS:
        return np.concatenate([_block(name, part) for part in _parts(row, _BLOCKS[name])])
    return np.concatenate([_sparse(name, part, len(row)) for part in _parts(row, 4096)])


def _parts(row: np.ndarray, size: int) -> list[np.ndarray]:
    return [row[i : i + size] for i in range(0, len(row), size)]


def _block(name: str, part: np.ndarray) -> np.ndarray:
    top, largest = np.abs(part).max(), np.float32(_LARGEST[name])
    if name == "int4":
        top = _up(top)
    if top == 0:
        return 0 * part
    codes = part / top * largest
    if name.startswith("int"):
        codes = np.round(codes)
    else:
        kind = ml_dtypes.float8_e4m3fn if name == "fp8" else ml_dtypes.float8_e5m2
        codes = codes.astype(kind).astype(np.float32)
    return np.float32(codes * np.float32(1 / largest) * top)


def _up(x: np.float32) -> np.float32:
    """Return the least bfloat16 that is not below x."""
    near = np.float32(np.asarray(x).astype(ml_dtypes.bfloat16))
    if near >= x:
        return near
    above = np.asarray(near).astype(ml_dtypes.bfloat16).view(np.uint16) + 1
    return np.float32(np.asarray(above, np.uint16).view(ml_dtypes.bfloat16))


def _sparse(name: str, part: np.ndarray, row_size: int) -> np.ndarray:
    fraction = 0.02 if name == "top_k" else 0.1
    # A last chunk that is shorter sends as many; zeros behind it fill up.
    count = math.ceil(fraction * min(4096, row_size) * (1 - 1e-9))
    padded = np.pad(part, (0, min(4096, row_size) - len(part)))
    places = np.argsort(-np.abs(padded), kind="stable")[:count]
    values, out = padded[places], np.zeros_like(padded)
    sizes = np.abs(values)
    if name == "top_k":
        top = _up(sizes.max())
        sent = np.round(values / top * 127) * np.float32(1 / 127) * top if top else 0 * values
    else:
        is_large = sizes >= (sizes.min() + sizes.max()) / 2
        levels = [sizes[is_large == s].mean() if np.any(is_large == s) else 0 for s in (0, 1)]
        levels = np.float32(np.asarray(levels, np.float32).astype(ml_dtypes.bfloat16))
        sent = np.where(values < 0, -1, 1) * levels[is_large.astype(int)]
    out[places] = sent
    return np.float32(out[: len(part)])
