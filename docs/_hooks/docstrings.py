"""Says sections of docstrings as griffe knows them, whose Google style has neither of two.

`Communication: ...` would become a box titled with half a sentence, and `Example:` a quotation.
"""

import re
import textwrap

import griffe

# A name and the beginning of its text in one line; lines that go on are indented.
_SECTION = re.compile(r"^([A-Z]\w+): +(\S.*(?:\n +\S.*)*)$", re.MULTILINE)
# What is indented under the word, with empty lines inside.
_EXAMPLE = re.compile(r"^Example:\n((?:(?: +\S.*|\n(?= ))\n?)+)", re.MULTILINE)


def _code(indented: str) -> str:
    return textwrap.dedent(indented).strip("\n")


def as_known(docstring: str) -> str:
    """`docstring` with code as code, and one-line sections as paragraphs of that name."""
    docstring = _EXAMPLE.sub(lambda m: f"**Example:**\n\n```py\n{_code(m[1])}\n```\n", docstring)
    return _SECTION.sub(lambda m: f"**{m[1]}:** {' '.join(m[2].split())}", docstring)


class KnownSections(griffe.Extension):
    """Rewrites every docstring that is loaded."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Called by griffe for every module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = as_known(obj.docstring.value)
