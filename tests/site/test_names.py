"""Which code in a text is a link to the API, and that no page writes a name that there is not."""

import re
from pathlib import Path

import names
import pytest

DOCS = Path(__file__).parents[2] / "docs"
KNOWN = names.targets()


@pytest.mark.parametrize(
    ("code", "path"),
    [
        ("js.slowmo", "jaxslowmo.slowmo"),
        ("slowmo", "jaxslowmo.slowmo"),
        ("local_sgd(48)", "jaxslowmo.local_sgd"),
        ("js.make_mesh({'replica': 4})", "jaxslowmo.make_mesh"),
        ("js.topology.ring", "jaxslowmo.topology.ring"),
        ("js.reports.CommReport.wire_bytes", "jaxslowmo.reports.CommReport"),
        ("TPUManager", "torch_compat.TPUManager"),
        ("jaxslowmo.checkpoint", None),  # a module
        ("init", None),  # words of English
        ("mean", None),
        ("slowmo over local_sgd", None),
        ("jaxslowmo train --algorithm slowmo", None),
        ("slowmo_frequency", None),
    ],
)
def test_code_that_is_a_public_name_is_linked(code, path):
    assert names.target(code, KNOWN) == path


def spans(path: Path) -> list[str]:
    """Code in the running text of a page."""
    text = re.sub(r"^ *```.*?^ *```$", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`(js\.[^`]+)`", text)


@pytest.mark.parametrize("page", sorted(str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md")))
def test_what_pages_write_of_js_exists(page):
    modules = {f"js.{topic}" for topic in names.TOPICS}
    for code in spans(DOCS / page):
        assert code in modules or names.target(code, KNOWN), code
