"""Every Python block of these pages runs."""

import pytest

from recipes.doc_blocks import LOOP, MAPPED, SETTING, num_blocks, run, sections


@pytest.mark.parametrize("page", ["recipes", "reading-state", "choosing", "ddp", "checkpoints"])
def test_every_block_belongs_to_a_section_that_is_run(page):
    assert sum(map(len, sections(page).values())) == num_blocks(page) > 0


@pytest.mark.parametrize(
    "title",
    [t for t, blocks in sections("recipes").items() if blocks and t not in (SETTING, LOOP, MAPPED)],
)
def test_recipe_runs(title):
    run("recipes", SETTING, LOOP, MAPPED, title)


@pytest.mark.parametrize("page", ["reading-state", "choosing", "ddp", "checkpoints"])
def test_page_runs(page):
    run(page, *[title for title, blocks in sections(page).items() if blocks])
