"""What every algorithm compiles to on one TPU slice and on four, as a table.

    python benchmarks/tpu_proofs.py                 # prints it
    python benchmarks/tpu_proofs.py --write docs/tpu.md

Compiles only (libtpu from PyPI, no TPU), so it tells structure, not speed. The model and the
algorithms stand in `tests/support/tpu_steps.py`, the formulas in `tests/tpu_bytes.py`;
`tests/tpu_aot/test_proofs.py` holds all of it and keeps the documented table up to date.
"""

import os

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")

import argparse
import sys
from importlib.metadata import version
from pathlib import Path

import jax

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.tpu_table import BEGIN, END, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="a page whose table is replaced")
    page = parser.parse_args().write
    lines = [f"jax {jax.__version__}, libtpu {version('libtpu')}.", ""]
    print("\n".join(lines), flush=True)
    for row in table():
        print(row, flush=True)
        lines.append(row)
    if page:
        before, _, rest = page.read_text().partition(BEGIN)
        _, end, after = rest.partition(END)
        if not end:
            raise SystemExit(f"{page} has no lines {BEGIN!r} and {END!r}")
        page.write_text("\n".join([before + BEGIN, "", *lines, "", END + after]))


if __name__ == "__main__":
    main()
