"""Links what a page writes as code, such as `js.slowmo(...)`, to its entry in the API.

The pages stay plain: read in the repository, they have no links that only the site could follow.
Options of the command line (`--resume`) get a class, by which the style keeps them on one line.
"""

import re
import xml.etree.ElementTree as etree
from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor
from markdown.util import AtomicString
from names import target, targets

# Not what stands behind a letter, nor one that is so long that it may have to break.
_OPTION = re.compile(r"(?<![\w-])(--\w[\w-]{,22})(?![\w-])")
# Where a link would be in the way, or a second one.
_NOT_INSIDE = {"a", "autoref", "pre", *(f"h{level}" for level in range(1, 7))}


class CodeLinks(Treeprocessor):
    """Wraps `code` in a reference that autorefs resolves when all pages are known."""

    known = targets()

    def run(self, root: etree.Element) -> None:
        """Called by markdown with every page and docstring, and by itself with what they hold."""
        for place, child in enumerate(list(root)):
            if child.tag == "code":
                path = target(child.text or "", self.known)
                if path:
                    root[place] = _reference(child, path)
                else:
                    _keep_options_whole(child)
            elif child.tag not in _NOT_INSIDE:
                self.run(child)


def _keep_options_whole(code: etree.Element) -> None:
    """Puts each option of a command into an element of its own."""
    text, *rest = _OPTION.split(code.text or "")
    code.text = AtomicString(text)
    for option, behind in zip(rest[::2], rest[1::2], strict=True):
        span = etree.SubElement(code, "span", {"class": "option"})
        span.text, span.tail = AtomicString(option), AtomicString(behind)


def _reference(code: etree.Element, path: str) -> etree.Element:
    reference = etree.Element("autoref", {"identifier": path})
    reference.tail, code.tail = code.tail, None
    reference.append(code)
    return reference


class _CodeLinksExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        # After inline patterns (20) have made `code`, before the table of contents (5).
        md.treeprocessors.register(CodeLinks(md), "code_links", 8)


def on_config(config: Any) -> Any:
    """Called by mkdocs before anything is read."""
    config.markdown_extensions.append(_CodeLinksExtension())
    return config
