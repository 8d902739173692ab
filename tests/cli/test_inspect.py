"""`jaxslowmo inspect graph`, `graphs`, `schedule` and `config`: tables, JSON, files, pictures.

`docs/graphs.md` shows what the command makes.
"""

import json
import re
from pathlib import Path

import pytest

import jaxslowmo as js
from cli.commands import json_of
from jaxslowmo import topology
from jaxslowmo.cli._inspect_graphs import BEGIN, END, ON_PAGE, analyse_all, markdown
from jaxslowmo.cli.config._inspect import InspectGraphsConfig

PAGE = Path(__file__).parents[2] / "docs" / "graphs.md"
PNG = b"\x89PNG"


def test_graph_shows_facts_and_tables(call, tmp_path):
    outcome = call("inspect graph ring --nodes 8 --peers-per-step 2 --parameters 1000")
    assert (outcome.code, outcome.err) == (0, "")
    for row in (
        ["graph", "ring, 8 nodes, 2 peers per step"],
        ["rounds to an error of 0.001", "32"],
        ["bytes per node and round", "8,000"],
        ["0", "1, 7"],  # phone book
        ["0", "1, 7", "yes", "2"],  # round
        ["1", "0.805"],  # error
    ):
        assert row in outcome.rows
    assert "P[destination" not in outcome.out
    assert ["rounds to an error of 0.001", "0"] in call("inspect graph ring --nodes 1").rows
    long = call("inspect graph directed_linear --nodes 40")  # is shortened
    assert ["...", "24 more nodes"] in long.rows
    assert ["...", "24 more rounds"] in long.rows
    assert "... (40 in all)" in long.out
    book = tmp_path / "mine.json"
    book.write_text("[[1, 2], [0], [1]]")
    rows = call("inspect graph --phone-book", book).rows
    assert ["graph", "mine, 3 nodes, 1 peer per step"] in rows
    assert ["0", "1, 2"] in rows


def test_json_of_a_graph_holds_everything(call):
    outcome = call(
        "inspect graph grid_2d --nodes 4 --rows 1 --model-bytes 100 --mixing self_weighted:0.5",
        "--tolerance 0.01 --json --matrices",
    )
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
    without = json.loads(call("inspect graph ring --nodes 2 --dedupe --json").out)
    assert without["phone_book"] == [[1], [0]]
    assert {"matrix", "product"}.isdisjoint({*without, *without["rounds"][0]})
    assert (without["model_bytes"], without["bytes_max"]) == (None, None)
    options = "random_matching --nodes 6 --num-rounds 3 --seed 5"
    facts = json.loads(call("inspect graph", options, "--json").out)
    expected = topology.random_matching(6, num_rounds=3, seed=5)
    assert facts["phone_book"] == [list(row) for row in expected.phone_book]
    facts = json.loads(call("inspect graph inner_outer --nodes 8 --group-size 4 --json").out)
    assert facts["num_rounds"] == topology.inner_outer(8, group_size=4).num_rounds


def test_files_that_are_no_phone_book_are_refused(call, tmp_path):
    for text, part in (
        ("[[1], [0]", "JSON"),
        ("[1, 0]", "sequence"),
        ("[[1], [5]]", "names 5"),
        ('[["1"], [0]]', "names '1'"),
        ("[]", "--phone-book"),
        (str([[(node + 1) % 1025] for node in range(1025)]), "1025"),
    ):
        (tmp_path / "book.json").write_text(text)
        call("inspect graph --phone-book", tmp_path / "book.json").is_refused("book", part)


def test_graphs_writes_tables_json_a_picture_and_a_page(call, tmp_path):
    outcome = call(
        "inspect graphs --nodes 4,5 --graphs ring,ring:2,bipartite_linear,star --picture-nodes 5",
        "--out", tmp_path,
    )  # fmt: skip
    assert (outcome.code, outcome.err) == (0, "")
    lines = [line.split() for line in outcome.out.splitlines()]
    for row in ("ring 20 33", "bipartite_linear 20 none", "star 1.5 (3) 1.6 (4)"):
        assert row.split() in lines
    assert "bipartite_linear with 5 nodes: none, since" in outcome.out
    names = ("graphs.md", "graphs.json", "graphs.png")
    assert outcome.out.splitlines()[-3:] == [str(tmp_path / name) for name in names]
    text = (tmp_path / "graphs.md").read_text()
    assert "| nodes | 4 | 5 |\n|---|---:|---:|\n| ring | 20 | 33 |\n| ring:2 | 7 | 12 |\n" in text
    assert "- bipartite_linear with 5 nodes: none" in text
    assert (tmp_path / "graphs.png").read_bytes().startswith(PNG)
    facts = json_of(tmp_path / "graphs.json")
    assert [(f["name"], f["num_nodes"]) for f in facts["graphs"][:3]] == [
        ("ring", 4), ("ring", 5), ("ring:2", 4),
    ]  # fmt: skip
    assert facts["graphs"][0]["rounds_to_tolerance"] == 20
    assert "must be even" in facts["graphs"][5]["error"]
    assert facts["config"]["nodes"] == [4, 5]
    page, texts = tmp_path / "page.md", []
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):
        outcome = call("inspect graphs --nodes 4 --graphs ring --picture-nodes 4 --page", page)
        assert outcome.out.splitlines()[-2:] == [str(page), str(tmp_path / "page.png")]
        texts.append(page.read_text())
    assert texts[0].startswith(f"before\n{BEGIN}\n\nMixing: uniform.")
    assert texts[0].endswith(f"|\n\n{END}\nafter\n")
    assert (texts[0].count("| nodes |"), text.count("| nodes |")) == (2, 4)
    assert "old" not in texts[0]
    assert texts[0] == texts[1]


def test_the_page_shows_what_the_command_makes(capsys):
    """Compare the sizes that take no time."""
    config, page = InspectGraphsConfig(nodes=(4, 8, 16)), PAGE.read_text()
    made = markdown(config, analyse_all(config), ON_PAGE)
    shown = page.partition(f"{BEGIN}\n\n")[2].partition(f"\n{END}")[0]
    lines = [
        line if line[:1] != "|" else f"{'|'.join(line.split('|')[:5])}|"
        for line in shown.splitlines()
    ]
    assert lines == made.splitlines()
    code, output = re.search(r"```python\n(.*?)```.*?```text\n(.*?)```", page, re.DOTALL).groups()
    exec(code, {})
    assert capsys.readouterr().out == output


SIZES = "--stages 4 --microbatches 8"


def test_a_schedule_with_the_kinds_beside_it(call):
    outcome = call("inspect schedule zero_bubble", SIZES, "--backward-weight 2")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("zero_bubble: 4 stages, 8 microbatches")
    schedule = js.schedules.zero_bubble(4, 8)
    found = schedule.simulate(backward_weight=2)
    together = schedule.simulate(backward_weight=2, lockstep=True)
    both = [f"{100 * one.bubble:.1f} %" for one in (found, together)]
    for row in (
        ["time, each stage as soon as it can", f"{found.time:g}"],
        ["bubble", both[0]],
        ["stash of each stage, microbatches of a chunk", "4"],
        ["messages that each stage sends", "8 16 16 8"],
        ["zero_bubble (H1)", "1", *both, "4", "16"],
    ):
        assert row in outcome.rows
    kinds = "gpipe one_f_one_b interleaved zero_bubble|(H1) zero_bubble|(H2) zbv lockstep"
    assert [row[0].replace(" ", "|") for row in outcome.rows[-7:]] == kinds.split()
    sizes = "--stages 4 --microbatches 6 --lockstep --most-stash 3"
    outcome = call("inspect schedule lockstep", sizes)
    schedule = js.schedules.lockstep(4, 6, most_stash=3)
    assert ["time, in lockstep", f"{schedule.simulate(lockstep=True).time:g}"] in outcome.rows
    assert ["interleaved", *["none"] * 5] in outcome.rows
    orders = call("inspect schedule interleaved", SIZES, "--chunks 2 --forward-only --orders").out
    assert "F7" in orders
    assert "I0" not in orders


def test_a_schedule_as_json_orders_a_table_and_a_picture(call, tmp_path):
    facts = json.loads(call("inspect schedule zbv", SIZES, "--json").out)
    schedule = js.schedules.zbv(4, 8)
    assert facts["orders"] == schedule.orders()
    assert facts["placement"] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert facts["bubble"] == schedule.simulate().bubble
    assert facts["lockstep_time"] == schedule.simulate(lockstep=True).time
    assert facts["kinds"]["one_f_one_b"]["stash"] == [4, 3, 2, 1]
    orders = call("inspect schedule zbv", SIZES, "--orders").out
    assert orders.splitlines() == schedule.orders()
    (tmp_path / "mine.csv").write_text(orders)
    table = f"inspect schedule --table {tmp_path / 'mine.csv'}"
    outcome = call(table)
    assert outcome.out.startswith("mine: 4 stages, 8 microbatches, 2 chunks")
    assert "Kinds with" not in outcome.out
    assert call(table, "--orders").out == orders
    assert call(table, "--out", tmp_path / "a.png").out.splitlines()[-1].endswith("a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("options", "letters"),
    [
        ("zbv --stages 2 --microbatches 3", "FIW"),
        ("zero_bubble --stages 2 --microbatches 2 --backward-weight 0", "FIW"),  # bars of no width
        ("one_f_one_b --stages 3 --microbatches 4", "FB"),
        ("interleaved --stages 2 --microbatches 4 --chunks 3 --forward-only", "F"),
    ],
)
def test_a_picture_has_a_bar_per_operation_and_names_its_letters(call, tmp_path, options, letters):
    path = tmp_path / "schedule.svg"
    assert call(f"inspect schedule {options} --out {path}").code == 0
    orders = call(f"inspect schedule {options} --orders").out
    count, text = len(re.findall(r"[FIWB]\d", orders)), path.read_text()
    assert text.count('id="patch_') >= count + len(letters)
    assert "".join(re.findall(r"<!-- ([FIWB]): ", text)) == letters


def test_where_a_run_of_stages_would_lie(call):
    run = "inspect config --preset tiny --algorithm local_sgd --mesh replica=2,stage=2 --batch 4"
    outcome = call(run, "--schedule gpipe")
    assert (outcome.code, outcome.err) == (0, "")
    facts = dict(row for row in outcome.rows if len(row) == 2)
    assert facts["devices"] == "2 replicas of 2 devices (stage=2) on 4 of 8 CPU devices"
    assert facts["layers of each stage"] == "0 to 0; 1 to 2"
    assert (facts["executor"], facts["bubble, equal costs"]) == ("one_program", "20.0%")
    assert facts["microbatches that a stage holds"] == "4, 4"
    lines = outcome.out.splitlines()
    (average,) = (line for line in lines if line.startswith("average  replica"))
    assert average.split()[2:4] == ["all-reduce", "1"]
    assert not any(line.startswith("local    replica") for line in lines)
    facts = dict(row for row in call(run, "--executor host").rows if len(row) == 2)
    free = js.schedules.one_f_one_b(2, 4).simulate()  # no stage waits for the end of a tick
    assert (facts["executor"], facts["bubble, equal costs"]) == ("host", f"{free.bubble:.1%}")
