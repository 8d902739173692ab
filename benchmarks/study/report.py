"""Writes the study's tables and pictures, in docs/study.md, from its results.

python benchmarks/study/report.py            # writes them
python benchmarks/study/report.py --check    # fails if a table is not what the results give
"""

import argparse
import re
import sys
from pathlib import Path

from pictures import draw
from tables import Study, page

ROOT = Path(__file__).parents[2]
PARSER = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
PARSER.add_argument("--check", action="store_true", help="compare, and write nothing to docs")
PARSER.add_argument("--pictures", type=Path, default=ROOT / "docs", help="folder for the pictures")


PAGE = ROOT / "docs" / "study.md"


def with_blocks(text: str, tables: dict[str, str]) -> str:
    """Return the page with what stands between the markers of each table replaced."""
    for block, table in tables.items():
        begin, end = f"<!-- study:{block} -->", f"<!-- /study:{block} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        inside = f"\n\n{table}\n\n" if "\n" in table else table
        text, count = pattern.subn(lambda _, x=f"{begin}{inside}{end}": x, text)
        if count != 1:
            raise SystemExit(f"{PAGE.name} must have {begin} ... {end} once, found {count}")
    return text


def main() -> int:
    args, study = PARSER.parse_args(), Study()
    text = PAGE.read_text("utf-8")
    made = with_blocks(text, page(study))
    if not args.check:
        PAGE.write_text(made, "utf-8")
    elif made != text:
        print(f"{PAGE.name} differs from the results: run benchmarks/study/report.py")
        return 1
    args.pictures.mkdir(parents=True, exist_ok=True)
    for picture in draw(study, args.pictures):
        print(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
