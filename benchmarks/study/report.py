"""Writes the study's tables and pictures, in docs/ and benchmarks/results/study.md.

python benchmarks/study/report.py            # writes them
python benchmarks/study/report.py --check    # fails if a table is not what the results give
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from pictures import draw
from tables import Study, all_tables

ROOT = Path(__file__).parents[2]
PARSER = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
PARSER.add_argument("--check", action="store_true", help="compare, and write nothing to docs")
PARSER.add_argument("--pictures", type=Path, default=ROOT / "docs", help="folder for the pictures")


PAGES = [
    ROOT / "docs" / "study.md",
    ROOT / "benchmarks" / "results" / "study.md",
]


def with_tables(texts: Sequence[str], tables: dict[str, str]) -> list[str]:
    """Return the pages with what stands between the markers of each table replaced."""
    pages = list(texts)
    for name, table in tables.items():
        begin, end = f"<!-- study:{name} -->", f"<!-- /study:{name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        inside = f"\n\n{table}\n\n" if "\n" in table else table
        counts = [len(pattern.findall(page)) for page in pages]
        if sum(counts) != 1:
            raise SystemExit(f"the pages must have {begin} ... {end} once, found {sum(counts)}")
        pages = [pattern.sub(lambda _, x=f"{begin}{inside}{end}": x, page) for page in pages]
    return pages


def main() -> int:
    args, study = PARSER.parse_args(), Study()
    texts = [page.read_text("utf-8") for page in PAGES]
    for page, text, made in zip(PAGES, texts, with_tables(texts, all_tables(study)), strict=True):
        if not args.check:
            page.write_text(made, "utf-8")
        elif made != text:
            print(f"{page.name} differs from the results: run benchmarks/study/report.py")
            return 1
    args.pictures.mkdir(parents=True, exist_ok=True)
    for picture in draw(study, args.pictures):
        print(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
