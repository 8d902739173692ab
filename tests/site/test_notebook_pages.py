"""Notebooks on the site: all cells, the title once."""

import json

import notebook_pages
import pytest

NOTEBOOKS = sorted(notebook_pages.ROOT.glob("colab/*.ipynb"))
PAGES = sorted((notebook_pages.ROOT / "docs/programs").glob("*-notebook.md"))


def test_every_notebook_has_a_page():
    shown = notebook_pages.MARK.findall("".join(page.read_text("utf-8") for page in PAGES))
    assert sorted(shown) == [f"colab/{path.name}" for path in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_page_has_all_cells_and_no_second_title(path):
    shown = notebook_pages.on_page_markdown(f"# Title\n\n<!-- cells of colab/{path.name} -->\n")
    cells = ["".join(cell["source"]) for cell in json.loads(path.read_text("utf-8"))["cells"]]
    assert cells[0].startswith("# ")
    assert all(source in shown for source in cells[1:])
    code = "".join(shown.split("```py\n")[1:])
    assert len(shown.split("```py\n")) - 1 == code.count("\n```")
    titles = [line for line in shown.split("```")[0].splitlines() if line.startswith("# ")]
    assert titles == ["# Title"]
