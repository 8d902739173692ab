"""`jaxslowmo inspect graph`: facts and tables of one graph."""

import json

import pytest

from jaxslowmo import topology


def test_graph_shows_facts_and_tables(call):
    outcome = call(
        "inspect", "graph", "ring", "--nodes", 8, "--peers-per-step", 2, "--parameters", 1000
    )
    assert (outcome.code, outcome.err) == (0, "")
    rows = outcome.rows
    assert ["graph", "ring, 8 nodes, 2 peers per step"] in rows
    assert ["rounds to an error of 0.001", "32"] in rows
    assert ["bytes per node and round", "8,000"] in rows
    assert ["0", "1, 7"] in rows  # phone book
    assert ["0", "1, 7", "yes", "2"] in rows  # round
    assert ["0", "1"] in rows
    assert ["1", "0.805"] in rows  # error
    assert "P[destination" not in outcome.out


def test_long_graphs_are_shortened(call):
    outcome = call("inspect", "graph", "directed_linear", "--nodes", 40)
    assert ["...", "24 more nodes"] in outcome.rows
    assert ["...", "24 more rounds"] in outcome.rows
    assert "... (40 in all)" in outcome.out
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
    assert (outcome.code, ["rounds to an error of 0.001", "0"] in outcome.rows) == (0, True)


def test_phone_book_from_a_file(call, tmp_path):
    book = tmp_path / "mine.json"
    book.write_text("[[1, 2], [0], [1]]")
    rows = call("inspect", "graph", "--phone-book", book).rows
    assert ["graph", "mine, 3 nodes, 1 peer per step"] in rows
    assert ["0", "1, 2"] in rows


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
    ("text", "message"),
    [
        ("[[1], [0]", "is no JSON"),
        ('{"0": [1]}', "must hold a list with the list of out-peers of every node"),
        ("[1, 0]", "must hold a list with the list of out-peers of every node"),
        ("[[1], [5]]", "names 5, and the nodes are 0 to 1"),
        ('[["1"], [0]]', "names '1', and nodes are ints, 0 to 1"),
        ("[]", "--phone-book must have one row per node, got none"),
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
