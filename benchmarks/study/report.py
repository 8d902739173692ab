"""Writes the study's tables and pictures, in docs/study.md and README.md, from its results.

python benchmarks/study/report.py            # writes them
python benchmarks/study/report.py --check    # fails if a table is not what the results give
"""

import argparse
import re
import sys
from pathlib import Path

from pictures import draw
from tables import Study, blocks

ROOT = Path(__file__).parents[2]
PARSER = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
PARSER.add_argument("--check", action="store_true", help="compare, and write nothing to docs")
PARSER.add_argument("--pictures", type=Path, default=ROOT / "docs", help="folder for the pictures")


def with_blocks(page: str, tables: dict[str, str], name: str = "docs/study.md") -> str:
    """Return the page `name` with what stands between the markers of each table replaced."""
    for block, text in tables.items():
        begin, end = f"<!-- study:{block} -->", f"<!-- /study:{block} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        is_inline = "\n" not in text
        inside = text if is_inline else f"\n\n{text}\n\n"
        page, count = pattern.subn(lambda _, x=f"{begin}{inside}{end}": x, page)
        if count != 1:
            raise SystemExit(f"{name} must have {begin} ... {end} once, found {count}")
    return page


def main() -> int:
    args, study = PARSER.parse_args(), Study()
    for name, tables in blocks(study).items():
        path = ROOT / name
        text = path.read_text("utf-8")
        made = with_blocks(text, tables, name)
        if not args.check:
            path.write_text(made, "utf-8")
        elif made != text:
            print(f"{name} differs from the results: run benchmarks/study/report.py")
            return 1
    args.pictures.mkdir(parents=True, exist_ok=True)
    for picture in draw(study, args.pictures):
        print(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
