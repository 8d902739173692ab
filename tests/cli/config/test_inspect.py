"""What the commands below `jaxslowmo inspect` take and refuse."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxslowmo import topology
from jaxslowmo.cli._inspect_graphs import BEGIN
from support.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[3]


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
        ("graph ring --nodes 4 --peers-per-step 3", "--peers-per-step must be at most 2"),
        (
            "graph ring --nodes 4 --rows 2",
            "no option --rows; it has --peers-per-step, --dedupe",
        ),
        ("graph complete --nodes 4 --dedupe", "complete has no option --dedupe"),
        ("graph bipartite_linear --nodes 5", "--nodes must be even"),
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
        (
            "schedule",
            "give the KIND of a schedule or --table FILE; the kinds are gpipe, ",
        ),
        ("schedule gpipe --stages 4", "--stages and --microbatches must be given with the kind"),
        ("schedule zbbv --stages 4 --microbatches 8", "unknown kind of schedule 'zbbv'; the kinds"),
        ("schedule gpipe --stages 0 --microbatches 8", "--stages must be >= 1, got 0"),
        ("schedule gpipe --stages 128 --microbatches 129", "must be <= 16384, since more take"),
        (
            "schedule gpipe --stages 4 --microbatches 8 --memory 2",
            "no option --memory; it has",
        ),
        ("schedule zbv --stages 4 --microbatches 8 --chunks 3", "--chunks must be 2, got 3"),
        (
            "schedule interleaved --stages 4 --microbatches 6",
            "--microbatches must be a multiple of --stages (4), got 6",
        ),
        (
            "schedule lockstep --stages 4 --microbatches 6 --chunks 2 --most-stash 1",
            "--most-stash must have room for a microbatch of each of the chunks, 2, got 1",
        ),
        (
            "schedule gpipe --stages 4 --microbatches 8 --forward 0 --backward-input 0"
            " --backward-weight 0",
            "--forward, --backward-input and --backward-weight must not all be 0",
        ),
        ("schedule gpipe --table x.csv", "give the KIND of a schedule or --table FILE"),
        ("schedule --table x.csv --stages 2", "--stages does not go with --table"),
        ("schedule --table x.csv --memory 2", "--memory does not go with --table"),
        ("schedule --table /no/such/file", "--table: cannot read /no/such/file: No such"),
        ("schedule --table README.md", "in column 0 of stage 0 is no operation"),
        ("schedule gpipe --stages 4 --microbatches 8 --json --orders", "give one of --orders and"),
        (
            "schedule gpipe --stages 2 --microbatches 2 --out /no/a.png",
            "--out: cannot write /no/",
        ),
        ("schedule gpipe --stages 2 --microbatches 2 --out a.xyz", "--out: cannot write a.xyz: "),
        ("nothing", "No such command 'nothing'"),
    ],
)
def test_wrong_usage_is_one_line(call, monkeypatch, arguments, message):
    monkeypatch.chdir(ROOT)
    outcome = call("inspect", *arguments.split())
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1
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
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.stdout.splitlines()[-1] == "0 False"
