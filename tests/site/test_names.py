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
        ("js.make_mesh({'replica': 4})", "jaxslowmo.make_mesh"),
        ("js.topology.ring", "jaxslowmo.topology.ring"),
        ("js.reports.CommReport.wire_bytes", "jaxslowmo.reports.CommReport"),
        ("TPUManager", "torch_compat.TPUManager"),
        ("jaxslowmo.checkpoint", None),  # a module
        ("init", None),  # words of English
        ("jaxslowmo train --algorithm slowmo", None),
    ],
)
def test_code_that_is_a_public_name_is_linked(code, path):
    assert names.target(code, KNOWN) == path


def spans(path: Path) -> list[str]:
    """Code in the running text of a page."""
    text = re.sub(r"^ *```.*?^ *```$", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`(js\.[^`]+)`", text)


def test_what_pages_write_of_js_exists():
    written = {(page.name, code) for page in DOCS.rglob("*.md") for code in spans(page)}
    modules = {f"js.{topic}" for topic in names.TOPICS}
    assert [x for x in written if x[1] not in modules and not names.target(x[1], KNOWN)] == []
