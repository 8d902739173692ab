"""Shows `Communication: ...` in docstrings as a paragraph of that name, for griffe.

Its Google style knows no such section and would make a box of it, titled with half a sentence.
"""

import re

import griffe

# A name and the beginning of its text in one line; lines that go on are indented.
_SECTION = re.compile(r"^([A-Z]\w+): +(\S.*(?:\n +\S.*)*)$", re.MULTILINE)


def as_paragraphs(docstring: str) -> str:
    """`docstring` with one-line sections as paragraphs that begin with the name in bold."""
    return _SECTION.sub(lambda m: f"**{m[1]}:** {' '.join(m[2].split())}", docstring)


class NamedParagraphs(griffe.Extension):
    """Rewrites every docstring that is loaded."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Called by griffe for every module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = as_paragraphs(obj.docstring.value)
