"""Tables of compiled steps in a page, written by a script and compared by a test.

`benchmarks/tpu_proofs.py` writes that of `benchmarks/results/tpu_programs.md`, and
`benchmarks/gpu_proofs.py` that of `benchmarks/results/gpu_programs.md`.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.bytes_of_steps import bytes_sent
from support.steps_of_algorithms import NUM_PARAMETERS, Facts, Place, kinds


def formula_kind(kind: str) -> str:
    """Return the name of the kind in `bytes_sent`, where all rounds of gossip are one kind."""
    return "round" if kind.startswith("round") else kind


@dataclass(frozen=True)
class Table:
    """A table of compiled steps, and where it stands.

    Attributes:
      script: path of the script that writes it, from the repository's root.
      page: path of its page.
      versions: first line of the table, the versions of what has compiled.
      device, group: words of the columns, such as "chip" and "slice".
      cases: algorithms and their places.
      facts: compiles the program of (algorithm, place, kind).
      formula: returns the kind in `bytes_sent` of (kind, place).
      varying: columns that depend on the compiler's version.
    """

    script: str
    page: str
    versions: str
    device: str
    group: str
    cases: list[tuple[str, Any]]
    facts: Callable[[str, Any, str], Facts[Any]]
    formula: Callable[[str, Any], str] = lambda kind, place: formula_kind(kind)
    varying: tuple[str, ...] = ("temporary",)

    @property
    def header(self) -> str:
        sent = f"bytes per {self.device}"
        columns = (
            "where",
            "algorithm",
            "step",
            "collectives",
            f"inside a {self.group}: {sent}",
            "computed",
            f"across {self.group}s: {sent}",
            "computed",
            "beside a transfer",
            f"memory per {self.device}: arguments",
            "temporary",
        )
        return _line(columns)

    @property
    def _borders(self) -> tuple[str, str]:
        return f"<!-- table of {self.script} -->", "<!-- end of table -->"

    def lines(self) -> Iterator[str]:
        """Yield the lines of the table, header first; compile what was not compiled yet."""
        yield self.header
        yield "|" + "---|" * (self.header.count("|") - 1)
        for place in dict.fromkeys(place for _, place in self.cases):
            yield from self.rows(place)

    def rows(self, place: Place) -> Iterator[str]:
        """Yield the lines of one place."""
        for algorithm in [algorithm for algorithm, where in self.cases if where == place]:
            for kind in kinds(algorithm, place):
                yield _line(self._cells(algorithm, place, kind))

    def _cells(self, algorithm: str, place: Place, kind: str) -> tuple[str, ...]:
        program_facts = self.facts(algorithm, place, kind)
        ideal = bytes_sent(
            self.formula(kind, place),
            NUM_PARAMETERS,
            place.replicas,
            place.devices,
            with_padding=False,
        )
        several = place.num_groups > 1
        inside = (program_facts.bytes_sent("device"), ideal.device) if several else None
        across = (program_facts.bytes_sent("replica"), ideal.replica)
        if not several:
            inside, across = across, None
        schedule = program_facts.schedule
        return (
            place.name,
            algorithm,
            kind,
            _collectives(program_facts),
            *_numbers(inside),
            *_numbers(across),
            f"{schedule.num_under_way} of {len(schedule.products)}",
            f"{program_facts.argument_bytes:,}",
            f"{program_facts.temporary_bytes:,}",
        )

    def check_documented(self, place: Place) -> None:
        """Assert that the page has the rows of a place as they are now.

        What depends on the compiler's version is compared only where it is that of the page.
        """
        begin, end = self._borders
        page = (Path(__file__).parents[2] / self.page).read_text()
        inner = page.partition(begin)[2].partition(end)[0]
        versions, header, _, *lines = [line for line in inner.splitlines() if line]
        assert header == self.header
        places = {where.name for _, where in self.cases}
        assert {line.split(" | ")[0] for line in lines} == {f"| {name}" for name in places}
        documented = [line for line in lines if line.startswith(f"| {place.name} |")]
        now = list(self.rows(place))
        if versions != self.versions:
            documented, now = (list(map(self._fixed, lines)) for lines in (documented, now))
        assert documented == now, f"run `python {self.script} --write {self.page}`"

    def _fixed(self, line: str) -> list[str]:
        """Return the cells of a line that do not depend on the compiler's version."""
        pairs = zip(line.split(" | "), self.header.strip(" |").split(" | "), strict=True)
        return [cell for cell, column in pairs if column not in self.varying]

    def write(self, description: str | None) -> None:
        """Print the table, and write it to a page if the command line says so."""
        parser = argparse.ArgumentParser(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("--write", type=Path, help="a page whose table is replaced")
        page = parser.parse_args().write
        lines = [self.versions, ""]
        print("\n".join(lines), flush=True)
        for row in self.lines():
            print(row, flush=True)
            lines.append(row)
        if page:
            begin, end = self._borders
            before, _, rest = page.read_text().partition(begin)
            _, found, after = rest.partition(end)
            if not found:
                raise SystemExit(f"{page} has no lines {begin!r} and {end!r}")
            page.write_text("\n".join([before + begin, "", *lines, "", end + after]))


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def _numbers(pair: tuple[int, int] | None) -> tuple[str, str]:
    return ("", "") if pair is None else (f"{pair[0]:,}", f"{pair[1]:,}")


def _collectives(program_facts: Facts[Any]) -> str:
    listed = []
    for axes in sorted({row.axis for row in program_facts.rows}, reverse=True):
        counts = program_facts.counts(axes)
        counts.pop("recv", None)  # every send has one
        listed.append(
            f"{axes.replace(',', ' and ')}: "
            + ", ".join(f"{n} {name}" for name, n in counts.items())
        )
    return "; ".join(listed) or "none"
