"""What training steps of sharded replicas compile to on one TPU slice and on four, as a table.

    python benchmarks/tpu_sharded.py --out benchmarks/results/tpu_sharded.md
    python benchmarks/tpu_sharded.py --whole 124m      # all blocks, to check the straight line

GPTs in bfloat16 with AdamW, one window of each model's context per chip along "fsdp", blocks
computed again in the backward pass, host-scheduled. Compiles only (libtpu from PyPI, no TPU).
Blocks are alike, so models of 2 and of 4 are compiled, and the figures of the whole model lie on
the straight line through theirs (bytes, arguments: temporary memory grows faster).
`tests/tpu_aot/test_sharded.py` holds the facts on small models.
"""

import os

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import jax

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from jaxslowmo.models import gpt_preset
from support.tpu_sharded import Facts, Sharded, facts

GIB = 2**30
ONE, FOUR = 1, 4
PLACES = [
    ("124m", ONE, (("replica", 4), ("fsdp", 4))),
    ("124m", ONE, (("replica", 2), ("fsdp", 4), ("tensor", 2))),
    ("7b", FOUR, (("replica", 4), ("fsdp", 16))),
]
HEADER = (
    "| where | model | mesh | slow state | step | collectives between replicas "
    "| bytes per chip between replicas | computed | over fsdp | over tensor "
    "| memory per chip: arguments, GiB | temporary, GiB |"
)


def case(preset: str, num_slices: int, axes: tuple[tuple[str, int], ...]) -> Sharded:
    config = gpt_preset(preset, dtype="bfloat16")
    config = dataclasses.replace(config, remat=True, qkv_by_head=True)
    return Sharded(config, "v5e:4x4", axes, num_slices)


def row(preset: str, of: Sharded, kind: str, found: Facts) -> str:
    where = "v5e:4x4" if of.num_slices == 1 else f"{of.num_slices} x v5e:4x4"
    mesh = " x ".join(f"{size} {name}" for name, size in of.axes)
    between = {op: n for (axis, op), n in found.counts.items() if "replica" in axis and n}
    collectives = ", ".join(f"{n} {op}" for op, n in sorted(between.items())) or "none"
    own = sum(n for axis, n in found.sent.items() if "replica" in axis)
    cells = [
        where,
        preset,
        mesh,
        "sharded" if of.shard_state else "whole",
        kind,
        collectives,
        f"{own:,}",
        f"{of.between_replicas() if kind == 'slow' else 0:,}",
        f"{found.sent.get('fsdp', 0):,}",
        f"{found.sent.get('tensor', 0):,}" if "tensor" in dict(of.axes) else "",
        f"{found.argument_bytes / GIB:.2f}",
        f"{found.temporary_bytes / GIB:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


def rows(whole: str | None) -> Iterator[str]:
    yield HEADER
    yield "|" + "---|" * HEADER.count(" | ") + "---|"
    for preset, num_slices, axes in PLACES:
        if whole not in (None, preset):
            continue
        of = case(preset, num_slices, axes)
        for kind in ("local", "slow"):
            if whole:
                found = facts(of, kind)
            else:
                two, four = (facts(of.of_blocks(n), kind) for n in (2, 4))
                found = two.with_blocks(four, of.config.num_layers)
            yield row(preset, of, kind, found)
            if kind == "slow" and not whole:
                # What the program is given alone differs by the slow state; no program for that.
                other = dataclasses.replace(of, shard_state=False)
                two_bytes, four_bytes = (other.of_blocks(n).argument_bytes() for n in (2, 4))
                per_block = (four_bytes - two_bytes) / 2
                size = round(two_bytes + (of.config.num_layers - 2) * per_block)
                yield row(preset, other, "local", _of_local(of, size))


def _of_local(of: Sharded, argument_bytes: int) -> Facts:
    """A local step that is given more: what it sends and needs besides is the same."""
    two, four = (facts(of.of_blocks(n), "local") for n in (2, 4))
    found = two.with_blocks(four, of.config.num_layers)
    return dataclasses.replace(found, argument_bytes=argument_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where the table is written")
    parser.add_argument("--whole", help="compile all blocks of this preset")
    args = parser.parse_args()
    lines = [f"jax {jax.__version__}, libtpu {version('libtpu')}.", ""]
    for line in rows(args.whole):
        print(line, flush=True)
        lines.append(line)
        if args.out:
            args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
