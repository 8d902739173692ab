"""The README and the pages: reachable, and true to the recorded results."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
API = DOCS / "api/index.md"  # has a table of the pages beside it
TEXTS = [ROOT / "README.md", ROOT / "tests/README.md", *PAGES]
_LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")
# Such as `tests/golden` or `benchmarks/results/bench_reducer.md`, and not `OUT/logs`.
_PATH = re.compile(
    r"`((?:benchmarks|colab|docs|examples|jaxslowmo|requirements|tests|torch_compat)/[\w./*-]*)`"
)


def without_code(path: Path) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> list[str]:
    """Those of headings, as GitHub and mkdocs make them."""
    titles = re.findall(r"^#+ (.*)$", without_code(path), flags=re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", title.lower()).strip() for title in titles]
    return [re.sub(r"[\s-]+", "-", title) for title in words]


def rows(text: str) -> list[list[str]]:
    """Cells of the lines of tables."""
    lines = re.findall(r"^\|(.*)\|$", text, flags=re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def test_the_overview_names_every_page_and_says_what_it_is_for():
    overview = (DOCS / "index.md").read_text("utf-8")
    named = re.findall(r"^ *- .*\[[^\]]+\]\(([\w/-]+\.md)\)(?:.*\w)", overview, flags=re.MULTILINE)
    reference = re.findall(
        r"^\| \[.*?\]\(([\w-]+\.md)\) \|", API.read_text("utf-8"), flags=re.MULTILINE
    )
    under = {f"api/{page}" for page in reference}
    pages = {str(page.relative_to(DOCS)) for page in PAGES}
    assert {"index.md", *named, *under} == pages
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    in_order = list(files(settings["nav"]))
    assert set(in_order) == pages
    assert [page for page in in_order if page not in under] == ["index.md", *named]


def files(navigation: list[Any]) -> Iterator[str]:
    """Pages of mkdocs' `nav` in order, those of sections too."""
    for entry in navigation:
        for below in entry.values() if isinstance(entry, dict) else [entry]:
            yield from [below] if isinstance(below, str) else files(below)


def test_readme_links_every_guide():
    linked = set(_LINK.findall((ROOT / "README.md").read_text("utf-8")))
    elsewhere = {"docs/index.md", "docs/changelog.md"}  # the README is an overview itself
    guides = {f"docs/{page.name}" for page in DOCS.glob("*.md")}
    assert guides - elsewhere | {"docs/api/index.md"} <= linked


def test_links_lead_somewhere_and_files_that_are_named_exist():
    for path in TEXTS:
        for link in _LINK.findall(without_code(path)):
            file, _, part = link.partition("#")
            target = (path.parent / file).resolve() if file else path
            assert target.exists(), (path, link)
            if part:
                assert part in anchors(target), (path, link)
        for name in _PATH.findall(path.read_text("utf-8")):
            assert list(ROOT.glob(name.rstrip("/"))), (path, name)


def test_marks_are_explained():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"]
    marks = {mark.partition(":")[0] for mark in settings["ini_options"]["markers"]}
    explained = (ROOT / "tests/README.md").read_text("utf-8")
    assert marks <= set(re.findall(r"^- `(\w+)`:", explained, flags=re.MULTILINE))


RECORDED = {
    "torch: DDP": "torch: DDP",
    "`all_reduce_gradients`": "jax: all_reduce",
    "the same, 1 MiB buckets in ready order that XLA keeps apart": "jax: all_reduce, apart",
    "`sgp`": "jax: sgp",
    "`sgp`, `overlap=1`": "jax: sgp, overlapped",
    "`slowmo` over `local_sgd(12)`, every 48": "jax: slowmo(12, 48)",
    "`local_sgd(48)`": "jax: local_sgd(48)",
    "`diloco(48)`": "jax: diloco(48)",
    "`local_sgd(48, delay=40)`": "jax: local_sgd(48, delay=40)",
    "`diloco(48, delay=40)`": "jax: diloco(48, delay=40)",
    "torch: PostLocalSGD(48)": "torch: PostLocalSGD(48)",
    "no communication": "jax: no communication",
}


def test_steps_on_slow_links_are_as_recorded():
    """The README's table, which docs/benchmarks.md includes."""
    text = (ROOT / "README.md").read_text("utf-8")
    text = re.sub(r".*?^(\| step \| ms \|.*?)\n\n.*", r"\1", text, flags=re.DOTALL | re.MULTILINE)
    shown = {row[0]: row[1:] for row in rows(text)}
    results = ROOT / "benchmarks/results/cluster_step_time_200mbit.md"
    recorded = {row[0]: row[1:] for row in rows(results.read_text("utf-8"))}
    for step, key in RECORDED.items():
        milliseconds, ratio, *_, megabytes = recorded[key]
        assert shown[step][:2] == [milliseconds.split()[0], ratio], step
        assert float(shown[step][2]) == pytest.approx(float(megabytes), abs=0.0051), step
    assert {*RECORDED, "step", "---"} == set(shown)
