"""`--help` in lines that break between words, at any width."""

import textwrap
from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup

_INDENT = 6
# typer has brought its own click since 0.26: the classes are those that it uses.
_CONTEXT: Any = TyperCommand.context_class
_FORMATTER: Any = _CONTEXT.formatter_class


class _Formatter(_FORMATTER):
    """Writes a term on a line of its own and what it means below, so that neither is squeezed.

    Tables of two columns break names of options and lists of choices on a narrow terminal.
    """

    def write_text(self, text: str) -> None:
        for paragraph in text.split("\n\n"):
            self.write(self._wrapped(paragraph, self.current_indent))
            self.write("\n")

    def write_dl(
        self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2
    ) -> None:
        del col_max, col_spacing
        for term, meaning in rows:
            self.write(self._wrapped(term, self.current_indent))
            self.write("\n" + self._wrapped(meaning, self.current_indent + _INDENT) + "\n")

    def _wrapped(self, text: str, indent: int) -> str:
        return textwrap.fill(
            " ".join(text.split()),
            width=max(self.width, indent + 20),
            initial_indent=" " * indent,
            subsequent_indent=" " * indent,
            break_long_words=False,  # options are long words
            break_on_hyphens=False,
        )


class _Context(_CONTEXT):
    formatter_class = _Formatter


class _Described:
    help: str | None

    def get_short_help_str(self, limit: int = 45) -> str:
        """The whole first paragraph, where commands are listed."""
        del limit
        return (self.help or "").strip().partition("\n\n")[0]


class Command(_Described, TyperCommand):
    """A command whose help stands under the headings of its options."""

    context_class = _Context

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes arguments and options, those without a heading first."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                kind = f"{parameter.param_type_name.title()}s"
                panel = getattr(parameter, "rich_help_panel", None) or kind
                panels.setdefault(panel, []).append(record)
        for panel, records in panels.items():
            with formatter.section(panel):
                formatter.write_dl(records)


class Group(_Described, TyperGroup):
    """Commands whose list says what each is for."""

    context_class = _Context
