"""Writes the tables and pictures of docs/study.md from the recorded results.

python benchmarks/study/report.py            # writes them
python benchmarks/study/report.py --check    # fails if a table is not what the results give
"""

import argparse
import re
import sys
from pathlib import Path

from pictures import draw
from tables import Study, blocks

DOCS = Path(__file__).parents[2] / "docs"
PARSER = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
PARSER.add_argument("--check", action="store_true", help="compare, and write nothing to docs")
PARSER.add_argument("--pictures", type=Path, default=DOCS, help="folder for the pictures")


def with_blocks(page: str, tables: dict[str, str]) -> str:
    """Return the page with what stands between the markers of each table replaced."""
    for name, text in tables.items():
        begin, end = f"<!-- study:{name} -->", f"<!-- /study:{name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        is_inline = "\n" not in text
        inside = text if is_inline else f"\n\n{text}\n\n"
        page, count = pattern.subn(lambda _, x=f"{begin}{inside}{end}": x, page)
        if count != 1:
            raise SystemExit(f"docs/study.md must have {begin} ... {end} once, found {count}")
    return page


def main() -> int:
    args, study = PARSER.parse_args(), Study()
    path = DOCS / "study.md"
    page = path.read_text("utf-8")
    made = with_blocks(page, blocks(study))
    if args.check and made != page:
        print("docs/study.md differs from the results: run benchmarks/study/report.py")
        return 1
    if not args.check:
        path.write_text(made, "utf-8")
    for picture in draw(study, args.pictures):
        print(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
