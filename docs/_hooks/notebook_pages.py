"""Shows a notebook on a page: its texts and its code; the repository keeps no outputs."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# `<!-- cells of colab/slowmo_on_tpu.ipynb -->`
MARK = re.compile(r"^<!-- cells of (colab/\w+\.ipynb) -->$", re.MULTILINE)


def on_config(config: Any) -> Any:
    """Called by mkdocs before anything is read: links pages to the repository."""
    address = runpy.run_path(str(ROOT / "tools/address.py"))["read"]()
    config.repo_url = address.repository or None
    return config


def on_page_markdown(markdown: str, **kwargs: object) -> str:
    """Called by mkdocs for every page before it is rendered."""
    return MARK.sub(lambda match: cells(ROOT / match[1]), markdown)


def cells(path: Path) -> str:
    """The notebook as markdown, without its title, which is the page's."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return "\n\n".join(filter(None, map(_shown, notebook["cells"])))


def _shown(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "code":
        return f"```py\n{source}\n```"
    return re.sub(r"\A# .*\n*", "", source)
