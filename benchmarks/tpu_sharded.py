"""What training steps of sharded replicas compile to on one TPU slice and on four, as a table.

    python benchmarks/tpu_sharded.py --out benchmarks/results/tpu_sharded.md
    python benchmarks/tpu_sharded.py --whole 124m      # all blocks, to check the straight line
    python benchmarks/tpu_sharded.py --only staged     # the second table alone

GPTs in bfloat16 with AdamW, one window of each model's context per chip along "fsdp", blocks
computed again in the backward pass, host-scheduled. Compiles only (libtpu from PyPI, no TPU).
Blocks are alike, so models of 2 and of 4 are compiled, and the figures of the whole model lie on
the straight line through theirs (bytes, arguments: temporary memory grows faster).

The second table has replicas that are pipelines in one program. Stages hold unlike numbers of
blocks, so nothing is extrapolated: what is compiled has fewer blocks, and of the whole model the
table says what follows from shapes alone. `--whole` compiles all blocks there, too.
"""

import os

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import jax

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from tpu_sharded_steps import Facts, SlicesSharded, facts
from tpu_staged_steps import Staged

from jaxslowmo.models import gpt_preset

Of = TypeVar("Of", bound=SlicesSharded)

GIB = 2**30
ONE, FOUR = 1, 4
PLACES = [
    ("124m", ONE, (("replica", 4), ("fsdp", 4))),
    ("124m", ONE, (("replica", 2), ("fsdp", 4), ("tensor", 2))),
    ("124m", FOUR, (("replica", 4), ("fsdp", 16))),
    ("7b", FOUR, (("replica", 4), ("fsdp", 16))),
]
HEADER = (
    "| where | model | mesh | slow state | step | collectives between replicas "
    "| bytes per chip between replicas | computed | over fsdp | over tensor "
    "| memory per chip: arguments, GiB | temporary, GiB |"
)

STAGED_BLOCKS = 6
STAGED_PLACES = [
    ("124m", ONE, (("replica", 4), ("stage", 4))),
    ("124m", ONE, (("replica", 2), ("stage", 4), ("fsdp", 2))),
]
SHAPES_ALONE = [
    ("124m", ONE, (("replica", 4), ("stage", 4))),
    ("124m", ONE, (("replica", 2), ("stage", 4), ("fsdp", 2))),
    ("124m", FOUR, (("replica", 4), ("stage", 4), ("fsdp", 4))),
    ("7b", FOUR, (("replica", 4), ("stage", 16))),
]
STAGED_HEADER = (
    "| where | model | blocks | mesh | slow state | step | over stage | bytes per chip over stage "
    "| between replicas | bytes per chip between replicas | computed | bytes per chip over fsdp "
    "| memory per chip: arguments, GiB | temporary, GiB |"
)


def case(
    preset: str, num_slices: int, axes: tuple[tuple[str, int], ...], kind: type[Of] = SlicesSharded
) -> Of:
    config = gpt_preset(preset, dtype="bfloat16")
    config = dataclasses.replace(config, remat=True, qkv_by_head=True)
    return kind(config, "v5e:4x4", axes, num_slices)


def _where(of: SlicesSharded) -> str:
    return "v5e:4x4" if of.num_groups == 1 else f"{of.num_groups} x v5e:4x4"


def _mesh(of: SlicesSharded) -> str:
    return " x ".join(f"{size} {name}" for name, size in of.axes)


def _slow_state(of: SlicesSharded) -> str:
    return "sharded" if of.shard_state else "whole"


def _collectives(found: Facts, name: str) -> str:
    over = {op: n for (axis, op), n in found.counts.items() if name in axis and n}
    return ", ".join(f"{n} {op}" for op, n in sorted(over.items())) or "none"


def _sent(found: Facts, name: str) -> int:
    return sum(n for axis, n in found.sent.items() if name in axis)


def row(preset: str, of: SlicesSharded, kind: str, found: Facts) -> str:
    cells = [
        _where(of),
        preset,
        _mesh(of),
        _slow_state(of),
        kind,
        _collectives(found, "replica"),
        f"{_sent(found, 'replica'):,}",
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


def _of_local(of: SlicesSharded, argument_bytes: int) -> Facts:
    """A local step that is given more: what it sends and needs besides is the same."""
    two, four = (facts(of.of_blocks(n), "local") for n in (2, 4))
    found = two.with_blocks(four, of.config.num_layers)
    return dataclasses.replace(found, argument_bytes=argument_bytes)


def staged_rows(whole: str | None) -> Iterator[str]:
    yield STAGED_HEADER
    yield "|" + "---|" * STAGED_HEADER.count(" | ") + "---|"
    for preset, num_slices, axes in STAGED_PLACES:
        if whole not in (None, preset):
            continue
        all_blocks = case(preset, num_slices, axes, Staged)
        of = all_blocks if whole else all_blocks.of_blocks(STAGED_BLOCKS)
        for kind in ("local", "slow"):
            yield staged_row(preset, of, kind, facts(of, kind))
    if not whole:
        yield from shape_rows()


def shape_rows() -> Iterator[str]:
    """Of whole models, without a program: what chips are given, and what slow steps should send."""
    for preset, num_slices, axes in SHAPES_ALONE:
        of = case(preset, num_slices, axes, Staged)
        yield staged_row(preset, of, "slow", None)
        yield staged_row(preset, dataclasses.replace(of, shard_state=False), "slow", None)


def staged_row(preset: str, of: Staged, kind: str, found: Facts | None) -> str:
    """A row of the second table; without `found` what shapes alone tell."""
    arguments = of.argument_bytes() if found is None else found.argument_bytes
    compiled = [""] * 6
    if found is not None:
        compiled = [
            _collectives(found, "stage"),
            f"{_sent(found, 'stage'):,}",
            _collectives(found, "replica"),
            f"{_sent(found, 'replica'):,}",
            f"{_sent(found, 'fsdp'):,}" if "fsdp" in dict(of.axes) else "",
            f"{found.temporary_bytes / GIB:.2f}",
        ]
    *over_stage_and_replicas, over_fsdp, temporary = compiled
    cells = [
        _where(of),
        preset,
        str(of.config.num_layers),
        _mesh(of),
        _slow_state(of),
        kind,
        *over_stage_and_replicas,
        f"{of.between_replicas() if kind == 'slow' else 0:,}",
        over_fsdp,
        f"{arguments / GIB:.2f}",
        temporary,
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where the table is written")
    parser.add_argument("--whole", help="compile all blocks of this preset")
    tables = {"sharded": rows, "staged": staged_rows}
    parser.add_argument("--only", choices=tables, help="make this table alone")
    args = parser.parse_args()
    lines = [f"jax {jax.__version__}, libtpu {version('libtpu')}."]
    for name in [args.only] if args.only else tables:
        lines.append("")
        for line in tables[name](args.whole):
            print(line, flush=True)
            lines.append(line)
            if args.out:
                args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
