"""`jaxslowmo inspect graphs`: tables, files, the page, the picture."""

import json
import shutil

import numpy as np
import pytest

from jaxslowmo import topology
from jaxslowmo.cli._inspect_graphs import BEGIN, END, curve_of, draw_graphs, tables
from jaxslowmo.cli.config._inspect import InspectGraphsConfig


def test_graphs_writes_tables_json_and_a_picture(call, tmp_path):
    outcome = call(
        "inspect", "graphs", "--nodes", "4,5", "--graphs", "ring,ring:2,bipartite_linear,star",
        "--picture-nodes", 5, "--out", tmp_path,
    )  # fmt: skip
    assert (outcome.code, outcome.err) == (0, "")
    rows = outcome.rows
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
    config = InspectGraphsConfig(nodes=(2,), graphs=("ring",))
    rounds, _, messages, _ = tables(config, {("ring", 2): found}).values()
    assert rounds == messages == {"ring": ["never"]}
    curve = curve_of("swap", found)
    assert curve.errors == pytest.approx(np.ones(len(curve.rounds)))
    path = tmp_path / "never.png"
    draw_graphs({2: [curve], 3: []}, path, tolerance=1e-3, mixing="a")
    assert path.exists()
