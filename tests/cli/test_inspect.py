"""`jaxslowmo inspect`: facts, tables, files, and the page that is made with it."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxslowmo import topology
from jaxslowmo.cli._inspect_config import InspectGraphsConfig
from jaxslowmo.cli._inspect_figure import Curve, draw_graphs
from jaxslowmo.cli._inspect_graphs import BEGIN, END, analyse_all
from jaxslowmo.cli._inspect_tables import QUANTITIES, cell

PAGE = Path(__file__).parents[2] / "docs" / "graphs.md"


def rows_of(text):
    """Cells of the lines of tables that rich has drawn."""
    lines = [line.strip("│ ") for line in text.splitlines() if line.startswith("│")]
    return [[part.strip() for part in line.split("│")] for line in lines]


def test_graph_shows_facts_and_tables(call):
    outcome = call(
        "inspect", "graph", "ring", "--nodes", 8, "--peers-per-step", 2, "--parameters", 1000
    )
    assert (outcome.code, outcome.err) == (0, "")
    rows = rows_of(outcome.out)
    assert ["graph", "ring, 8 nodes, 2 peers per step"] in rows
    assert ["rounds to an error of 0.001", "32"] in rows
    assert ["bytes per node and round", "8,000"] in rows
    assert ["0", "1, 7"] in rows  # phone book
    assert ["0", "1, 7", "yes", "2"] in rows  # round
    assert ["0", "1"] in rows
    assert ["1", "0.805"] in rows  # error
    assert "P[destination" not in outcome.out


def test_long_graphs_are_shortened(call):
    out = call("inspect", "graph", "directed_linear", "--nodes", 40).out
    assert ["...", "24 more nodes"] in rows_of(out)
    assert ["...", "24 more rounds"] in rows_of(out)
    assert "... (40 in all)" in out
    out = call("inspect", "graph", "complete", "--nodes", 40).out  # static: the peers of its round
    assert "... (39 in all)" in out


def test_json_holds_everything(call):
    outcome = call(
        "inspect", "graph", "grid_2d", "--nodes", 4, "--rows", 1, "--model-bytes", 100,
        "--mixing", "self_weighted:0.5", "--tolerance", 0.01, "--json", "--matrices",
    )  # fmt: skip
    facts = json.loads(outcome.out)
    graph, mixing = topology.grid_2d(4, rows=1), topology.self_weighted(0.5)
    found = topology.analyse(graph, mixing, model_bytes=100, tolerance=0.01)
    assert facts["phone_book"] == [[1], [2, 0], [3, 1], [2]]
    for name in ("rounds_to_tolerance", "spectral_gap", "bytes_mean", "bytes_max", "weights_move"):
        assert facts[name] == getattr(found, name), name
    assert facts["weight_range"] == list(found.weight_range)
    assert (facts["mixing"], facts["is_regular"]) == ("self_weighted:0.5", False)
    (only,) = facts["rounds"]
    assert only["matrix"] == found.matrix(0).tolist()
    assert facts["product"] == found.product.tolist()
    assert facts["errors"][0] == {"rounds": 0, "error": pytest.approx(1)}
    last = facts["errors"][-1]
    assert (last["rounds"], last["error"] <= 0.01) == (found.rounds_to_tolerance, True)
    without = json.loads(call("inspect", "graph", "ring", "--nodes", 2, "--json").out)
    assert "matrix" not in without["rounds"][0]
    assert "product" not in without
    assert (without["model_bytes"], without["bytes_max"]) == (None, None)


def test_matrices_are_printed_whole(call):
    out = call("inspect", "graph", "npeer_directed_exponential", "--nodes", 4, "--matrices").out
    assert out.count("P[destination, source] of round") == 2
    assert "[[0.5 0.  0.  0.5]\n [0.5 0.5 0.  0. ]" in out
    quarters = "[0.25 0.25 0.25 0.25]"
    assert out.endswith("\nproduct over a rotation\n[" + "\n ".join([quarters] * 4) + "]\n")


def test_one_node(call):
    outcome = call("inspect", "graph", "ring", "--nodes", 1)
    assert (outcome.code, ["rounds to an error of 0.001", "0"] in rows_of(outcome.out)) == (0, True)


def test_phone_book_from_a_file(call, tmp_path):
    book = tmp_path / "mine.json"
    book.write_text("[[1, 2], [0], [1]]")
    out = call("inspect", "graph", "--phone-book", book).out
    assert ["graph", "mine, 3 nodes, 1 peer per step"] in rows_of(out)
    assert ["0", "1, 2"] in rows_of(out)


def test_options_of_single_constructors(call):
    facts = json.loads(
        call(
            "inspect", "graph", "random_matching", "--nodes", 6, "--num-rounds", 3, "--seed", 5,
            "--json",
        ).out
    )  # fmt: skip
    expected = topology.random_matching(6, num_rounds=3, seed=5)
    assert facts["phone_book"] == [list(row) for row in expected.phone_book]
    facts = json.loads(
        call("inspect", "graph", "inner_outer", "--nodes", 8, "--group-size", 4, "--json").out
    )
    assert facts["num_rounds"] == topology.inner_outer(8, group_size=4).num_rounds
    facts = json.loads(call("inspect", "graph", "ring", "--nodes", 2, "--dedupe", "--json").out)
    assert facts["phone_book"] == [[1], [0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("graph", "give the NAME of a graph or --phone-book FILE; the names are npeer_"),
        ("graph rnig --nodes 4", "unknown graph 'rnig'; the graphs are npeer_directed_exponential"),
        ("graph ring", "--nodes must be given with the name of a graph"),
        ("graph ring --nodes 0", "--nodes must be >= 1, got 0"),
        ("graph ring --nodes four", "Invalid value for '--nodes'"),
        ("graph ring --nodes 5000", "--nodes: at most 1024 nodes are analysed, since more take"),
        (
            "graph star --nodes 1024 --peers-per-step 1",
            "--nodes: star with 1024 nodes takes minutes, since its rotation has 1023 rounds;",
        ),
        ("graphs --nodes 4,1025", "--nodes: at most 1024 nodes are analysed, since more take"),
        ("graphs --picture-nodes 1025", "--picture-nodes: at most 1024 nodes are analysed"),
        ("graph ring --nodes 4 --peers-per-step 0", "--peers-per-step must be >= 1, got 0"),
        ("graph ring --nodes 4 --peers-per-step 3", "`peers_per_step` must be at most 2"),
        ("graph ring --nodes 4 --rows 2", "ring has no option 'rows'"),
        ("graph complete --nodes 4 --dedupe", "complete has no option 'dedupe'"),
        ("graph bipartite_linear --nodes 5", "`num_nodes` must be even"),
        ("graph ring --nodes 4 --mixing half", "--mixing must be uniform, or self_weighted:SHARE"),
        ("graph ring --nodes 4 --mixing self_weighted:2", "--mixing must be uniform"),
        ("graph ring --nodes 4 --tolerance 0", "--tolerance must lie strictly between 0 and 1"),
        ("graph ring --nodes 4 --model-bytes -1", "--model-bytes must be >= 0, got -1"),
        ("graph ring --nodes 4 --parameters -1", "--parameters must be >= 0, got -1"),
        ("graph ring --nodes 4 --parameters 1 --model-bytes 4", "give one of --model-bytes and"),
        ("graph ring --nodes 4 --phone-book x.json", "give the NAME of a graph or --phone-book"),
        ("graph --phone-book x.json --nodes 4", "--nodes does not go with --phone-book"),
        ("graph --phone-book /no/such/file", "--phone-book: cannot read /no/such/file: No such"),
        ("graph --bogus", "No such option: --bogus"),
        ("graphs --nodes ,", "--nodes must list one or more different values, got nothing"),
        ("graphs --nodes 4,x", "--nodes must be integers separated by commas, got 4,x"),
        ("graphs --nodes 0", "--nodes must be >= 1, got 0"),
        ("graphs --picture-nodes 4,4", "--picture-nodes must list one or more different values"),
        ("graphs --graphs ring,rnig", "--graphs must be of npeer_directed_exponential, "),
        (
            "graphs --graphs ring:two",
            "--graphs: peers per step must be a number >= 1, as in ring:2",
        ),
        ("graphs --graphs ring,ring", "--graphs must list one or more different values"),
        ("graphs --mixing none", "--mixing must be uniform"),
        ("graphs --tolerance 1", "--tolerance must lie strictly between 0 and 1, got 1.0"),
        ("graphs --page /no/such/page.md", "--page: cannot read /no/such/page.md: No such file"),
        ("graphs --page README.md", f"--page: README.md must have a line {BEGIN}"),
        ("nothing", "No such command 'nothing'"),
    ],
)
def test_wrong_usage_is_one_line(call, monkeypatch, arguments, message):
    monkeypatch.chdir(PAGE.parents[1])
    outcome = call("inspect", *arguments.split())
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1
    assert message in outcome.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[1], [0]", "is no JSON"),
        ('{"0": [1]}', "must hold a list with the list of out-peers of every node"),
        ("[1, 0]", "must hold a list with the list of out-peers of every node"),
        ("[[1], [5]]", "names 5, and the nodes are 0 to 1"),
        ('[["1"], [0]]', "names '1', and nodes are ints, 0 to 1"),
        ("[]", "`table` must have one row per node, got none"),
        pytest.param(
            str([[(node + 1) % 1025] for node in range(1025)]),
            "--phone-book: at most 1024 nodes are analysed",
            id="large",
        ),
    ],
)
def test_files_that_are_no_phone_book_are_refused(call, tmp_path, text, message):
    book = tmp_path / "book.json"
    book.write_text(text)
    outcome = call("inspect", "graph", "--phone-book", book)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert message in outcome.err


def test_help_lists_the_graphs(call):
    out = call("inspect", "graph", "--help").out
    assert all(name in out for name in topology.GRAPHS)
    assert "graphs" in call("inspect").out


def test_inspecting_loads_no_jax():
    code = (
        "import sys\nfrom jaxslowmo.cli import main\n"
        "try:\n    main(['inspect', 'graph', 'ring', '--nodes', '4'])\n"
        "except SystemExit as exit:\n    print(exit.code, 'jax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.splitlines()[-1] == "0 False"


def test_graphs_writes_tables_json_and_a_picture(call, tmp_path):
    outcome = call(
        "inspect", "graphs", "--nodes", "4,5", "--graphs", "ring,ring:2,bipartite_linear,star",
        "--picture-nodes", 5, "--out", tmp_path,
    )  # fmt: skip
    assert (outcome.code, outcome.err) == (0, "")
    rows = rows_of(outcome.out)
    assert ["ring", "20", "33"] in rows
    assert ["bipartite_linear", "20", "none"] in rows
    assert ["star", "1.5 (3)", "1.6 (4)"] in rows
    assert "bipartite_linear with 5 nodes: none, since" in outcome.out
    assert outcome.out.splitlines()[-3:] == [
        str(tmp_path / name) for name in ("graphs.md", "graphs.json", "graphs.png")
    ]
    text = (tmp_path / "graphs.md").read_text()
    assert "| nodes | 4 | 5 |\n|---|---:|---:|\n| ring | 20 | 33 |\n| ring:2 | 7 | 12 |\n" in text
    assert "- bipartite_linear with 5 nodes: none" in text
    assert (tmp_path / "graphs.png").read_bytes().startswith(b"\x89PNG")
    facts = json.loads((tmp_path / "graphs.json").read_text())
    assert [(f["name"], f["num_nodes"]) for f in facts["graphs"][:3]] == [
        ("ring", 4), ("ring", 5), ("ring:2", 4),
    ]  # fmt: skip
    assert facts["graphs"][0]["rounds_to_tolerance"] == 20
    assert "must be even" in facts["graphs"][5]["error"]
    assert facts["config"]["nodes"] == [4, 5]


def test_graphs_replaces_the_tables_of_a_page(call, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    outcome = call(
        "inspect", "graphs", "--nodes", 4, "--graphs", "ring", "--picture-nodes", 4, "--page", page
    )
    assert (outcome.code, outcome.out.splitlines()[-2:]) == (
        0, [str(page), str(tmp_path / "page.png")],
    )  # fmt: skip
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n\nMixing: uniform.")
    assert text.endswith(f"|\n\n{END}\nafter\n")
    assert "old" not in text
    assert {path.name for path in tmp_path.iterdir()} == {"page.md", "page.png"}
    shutil.copy(page, tmp_path / "first.md")
    call(
        "inspect", "graphs", "--nodes", 4, "--graphs", "ring", "--picture-nodes", 4, "--page", page
    )
    assert page.read_text() == (tmp_path / "first.md").read_text()


def test_picture_of_a_graph_that_never_agrees(tmp_path):
    def swapping(graph, step):
        return np.array([[0.0, 1.0], [1.0, 0.0]])

    found = topology.analyse(topology.ring(2), swapping)
    assert cell(QUANTITIES[0], found) == cell(QUANTITIES[2], found) == "never"
    curve = Curve.of("swap", found)
    assert curve.errors == pytest.approx(np.ones(len(curve.rounds)))
    path = tmp_path / "never.png"
    draw_graphs({2: [curve], 3: []}, path, tolerance=1e-3, mixing="a")
    assert path.exists()


def test_the_page_shows_what_the_command_makes():
    """Of the sizes that take no time."""
    config = InspectGraphsConfig(nodes=(4, 8, 16))
    analyses = analyse_all(config)
    _, *tables = re.split(
        r"^\*\*(.*)\*\*$", PAGE.read_text().partition(BEGIN)[2].partition(END)[0], flags=re.M
    )
    assert tables[::2] == [quantity.title(config) for quantity in QUANTITIES]
    for quantity, text in zip(QUANTITIES, tables[1::2], strict=True):
        header, _, *rows = [
            [part.strip() for part in line.strip("|").split("|")]
            for line in text.splitlines()
            if line.startswith("|")
        ]
        assert header == ["nodes", *map(str, InspectGraphsConfig.nodes)]
        assert [row[:4] for row in rows] == [
            [graph, *(cell(quantity, analyses[graph, nodes]) for nodes in config.nodes)]
            for graph in config.graphs
        ]


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
