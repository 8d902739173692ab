"""Every Python block of the pages runs."""

import numpy as np
import pytest

import jaxslowmo as js
from recipes.doc_blocks import (
    DOCS,
    LOOP,
    MAPPED,
    SETTING,
    fresh,
    num_blocks,
    of_recipe,
    outputs,
    run,
    sections,
)

PAGES = [
    "accumulation", "checkpoints", "choosing", "ddp", "embeddings", "gpu", "graphs", "index",
    "input-pipeline", "mixed-precision", "model-parallel", "outer", "reading-state", "start",
    "your-data",
]  # fmt: skip
# tests/torch_compat and tests/on_jax run what needs torch, in environments of their own; one mesh
# has 64 chips.
ELSEWHERE = {
    "torch": None,
    "torch-on-jax": None,
    "torch-xla": None,
    "tpu-manager": None,
    "tpu": "Several slices",
    "your-data": "DataLoader of torch",
    "input-pipeline": "DataLoader of torch",
}


def test_every_page_with_code_is_run():
    pages = {path.relative_to(DOCS).parts[0].removesuffix(".md") for path in DOCS.rglob("*.md")}
    assert {page for page in pages if num_blocks(page)} == {*PAGES, "recipes", *ELSEWHERE}


@pytest.mark.parametrize("page", [*PAGES, "recipes", "tpu"])
def test_every_block_belongs_to_a_section_that_is_run(page):
    assert sum(map(len, sections(page).values())) == num_blocks(page) > 0


@pytest.mark.parametrize(
    "title",
    [
        pytest.param(title, marks=of_recipe(title))
        for title, blocks in sections("recipes").items()
        if blocks and title not in (SETTING, LOOP, MAPPED)
    ],
)
def test_recipe_runs(title):
    run("recipes", SETTING, LOOP, MAPPED, title)


@pytest.mark.parametrize("page", [*PAGES, "tpu"])
def test_page_runs(page):
    titles = [title for title, blocks in sections(page).items() if blocks]
    run(page, *[title for title in titles if title != ELSEWHERE.get(page)])


def test_mixing_prints_what_the_page_shows(capsys):
    fresh("graphs", "Mixing")
    assert [capsys.readouterr().out] == outputs("graphs", "Mixing")


def test_bubbles_are_those_that_the_page_shows(capsys):
    fresh("model-parallel", "When not to pipeline")
    assert [capsys.readouterr().out] == outputs("model-parallel", "When not to pipeline")


def test_accumulation_prints_what_the_page_shows(capsys):
    fresh("accumulation", SETTING, "What is sent")
    assert [capsys.readouterr().out] == outputs("accumulation", "What is sent")


def test_the_page_on_choosing_measures_a_step_with_its_all_reduce_and_one_without():
    names = run("choosing", "How long your all-reduce takes")
    sent = {}
    for name, step in names["steps"].items():
        report = js.comm_report(step, names["states"][name], names["batch"])
        kinds = set(report.kinds) & {"every", "local"}
        sent[name] = {kind: report.bytes(kind=kind) for kind in kinds}
    size = sum(leaf.nbytes for leaf in names["params"].values())
    assert sent == {"every update": {"every": size}, "never": {"local": 0}}
    assert names["computation"] > 0


def test_the_page_on_choosing_sweeps_a_momentum(capsys):
    names = fresh("choosing", "Slow momentum")
    assert {k: x.shape for k, x in names["models"].items()} == {"w": (3, 3, 8, 16), "v": (3, 3, 16)}
    assert capsys.readouterr().out.count(" to ") == 3
    assert np.all(np.isfinite(names["losses"]))
