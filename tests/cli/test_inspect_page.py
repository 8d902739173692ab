"""docs/graphs.md says what the command makes."""

import re
from pathlib import Path

from jaxslowmo import topology
from jaxslowmo.cli._inspect_graphs import BEGIN, END, analyse_all, tables
from jaxslowmo.cli.config._inspect import InspectGraphsConfig

PAGE = Path(__file__).parents[2] / "docs" / "graphs.md"


def test_the_page_shows_what_the_command_makes():
    """Of the sizes that take no time."""
    config = InspectGraphsConfig(nodes=(4, 8, 16))
    made = tables(config, analyse_all(config))
    _, *shown = re.split(
        r"^\*\*(.*)\*\*$", PAGE.read_text().partition(BEGIN)[2].partition(END)[0], flags=re.M
    )
    assert shown[::2] == list(made)
    for table, text in zip(made.values(), shown[1::2], strict=True):
        header, _, *rows = [
            [part.strip() for part in line.strip("|").split("|")]
            for line in text.splitlines()
            if line.startswith("|")
        ]
        assert header == ["nodes", *map(str, InspectGraphsConfig.nodes)]
        assert [row[:4] for row in rows] == [[graph, *cells] for graph, cells in table.items()]


def test_the_example_on_the_page_prints_what_is_shown(capsys):
    found = re.search(r"```python\n(.*?)```.*?```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found
    exec(found.group(1), {})
    assert capsys.readouterr().out == found.group(2)


def test_numbers_in_the_text_of_the_page():
    others = [n for n in range(3, 129) if n & (n - 1)]
    default = [
        topology.analyse(topology.npeer_directed_exponential(n)).rounds_to_tolerance for n in others
    ]
    assert (min(default), max(default)) == (10, 34)
    pairs = [
        topology.analyse(topology.random_matching(n)).rounds_to_tolerance
        for n in others
        if n % 2 == 0
    ]
    assert (min(pairs), max(pairs)) == (16, 28)
