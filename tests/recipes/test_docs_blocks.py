"""Every Python block of the pages runs, and prints what the page shows."""

import pytest

from recipes.doc_blocks import (
    DOCS,
    LOAD_IN_TORCH,
    LOOP,
    MAPPED,
    SETTING,
    TORCH,
    TPU,
    num_blocks,
    of_recipe,
    outputs,
    run,
    sections,
)

PAGES = """accumulation before-you-move-pmean checkpoints choosing ddp embeddings
    from-a-loop-to-diloco gpu input-pipeline islands mixed-precision model-parallel
    other-trainers outer reading-state start your-data"""
# tests/torch_compat and tests/on_jax run what needs torch, and tests/tpu_aot what needs libtpu, in
# environments of their own; one mesh has 64 chips.
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "torch": (),
    "torch-on-jax": (),
    "tpu": ("Several slices", *TPU),
    "your-data": ("DataLoader of torch",),
    "reading-state": (LOAD_IN_TORCH,),
    "model-parallel": TORCH,
}


def test_every_page_with_code_is_run_and_every_block_belongs_to_a_section():
    pages = {path.relative_to(DOCS).parts[0].removesuffix(".md") for path in DOCS.rglob("*.md")}
    assert {p for p in pages if num_blocks(p)} == {*PAGES.split(), "recipes", *ELSEWHERE}
    for page in (*PAGES.split(), "recipes", "tpu"):
        assert sum(map(len, sections(page).values())) == num_blocks(page) > 0


@pytest.mark.parametrize(
    "title",
    [
        pytest.param(title, marks=of_recipe(title))
        for title, blocks in sections("recipes").items()
        if blocks and title not in (SETTING, LOOP, MAPPED, *TORCH)
    ],
)
def test_recipe_runs(title):
    run("recipes", SETTING, LOOP, MAPPED, title)


@pytest.mark.parametrize("page", [*PAGES.split(), "tpu"])
def test_page_runs(page, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("RUN", str(tmp_path / "run"))  # the folder of islands
    titles = [title for title, blocks in sections(page).items() if blocks]
    run(page, *[title for title in titles if title not in ELSEWHERE.get(page, ())])
    if page == "from-a-loop-to-diloco":
        printed = capsys.readouterr().out
        losses = [float(line.split()[1]) for line in printed.splitlines()[:10]]
        assert (losses[4], losses[9]) == pytest.approx((0.24, 0.24), abs=0.02)  # as the page says
        assert outputs(page, "What it sends")[0] in printed
