"""Transfers between TPU slices, which the compiler writes as send and recv of its runtime."""

import re

from ._collectives import Groups

TARGET = re.compile(r'_xla_megascale_target=("[^"]*"|\{\{.*?\}\}|\{\})')
_TRANSFER_TYPE = re.compile(r'_xla_megascale_transfer_type="?(\w+)')
_PER_SLICE = 100_000  # a device is numbered slice * 100000 + place in the slice, slices from 1


def transfer_type(frontend_attributes: str) -> str:
    """The collective that a send or recv is a part of, such as "all-reduce", or ""."""
    found = _TRANSFER_TYPE.search(frontend_attributes)
    return found[1].lower().replace("_", "-") if found else ""


def parse_target(text: str, per_slice: int) -> tuple[Groups, bool]:
    """Devices that a transfer connects, numbered as in a mesh whose slices come first.

    Args:
      text: `"{1,2}x{0:7}"` (the devices of the same place in each slice), `{{100000,200000},...}`
        (groups) or `{{100000->200000},...}` (pairs).
      per_slice: devices of one slice.

    Returns:
      (groups, whether they are pairs); groups are None if the text has another form.

    >>> parse_target('"{1,2}x{0:1}"', 2)
    (((0, 2), (1, 3)), False)
    """
    text = text.strip('"')
    if product := re.fullmatch(r"\{([^{}]*)\}x\{([^{}]*)\}", text):
        slices, places = (_numbers(part) for part in product.groups())
        return tuple(tuple((s - 1) * per_slice + p for s in slices) for p in places), False
    groups = re.findall(r"\{([\d,>\s-]+)\}", text)
    if not groups:
        return None, False
    members = (tuple(int(i) for i in re.findall(r"\d+", group)) for group in groups)
    return tuple(tuple(_logical(i, per_slice) for i in group) for group in members), "->" in text


def _logical(device: int, per_slice: int) -> int:
    return (device // _PER_SLICE - 1) * per_slice + device % _PER_SLICE


def _numbers(text: str) -> list[int]:
    """`0:2,5` -> [0, 1, 2, 5]."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition(":")
        found.extend(range(int(first), int(last or first) + 1))
    return found
