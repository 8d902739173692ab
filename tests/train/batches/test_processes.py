"""Do the batches that several processes give fit together?"""

import json
import re

import optax
import pytest

import jaxslowmo as js
from jaxslowmo.train.batches import _processes
from jaxslowmo.train.batches._processes import Note, Verdict, compared
from support.pairs import two_processes
from train.step.problem import BATCHES, PARAMS, loss

pytestmark = pytest.mark.xdist_group("compared")  # they share two processes

LEAVES = [("x", "float32[8,3]"), ("y", "int32[8]")]


def notes(*digests, **changed):
    return {i: Note(**({"call": 1, "problem": None, "leaves": LEAVES, "digests": d} | changed))
            for i, d in enumerate(digests)}  # fmt: skip


def test_parts_that_differ_are_right():
    assert compared(notes({"0": "a"}, {"1": "b"}), "local") == Verdict()
    assert compared(notes({"0": "a"}, {"0": "a"}), "local") == Verdict()  # of one part
    assert compared(notes({}, {}), "local") == Verdict()  # later, values are not compared
    assert compared(notes({"whole": "a"}, {"whole": "a"}), "global") == Verdict()


def test_the_same_data_as_different_parts():
    found = compared(notes({"0": "a"}, {"1": "b"}, {"2": "a"}), "local")
    assert found.error is None
    assert found.warning.startswith("`batch`: processes 0, 2 give the same data as different parts")
    assert '`host_batch`="global"' in found.warning


def test_different_data_where_it_must_be_the_same():
    error = compared(notes({"0": "a", "1": "b"}, {"1": "c", "2": "d"}), "local").error
    assert error.startswith("`batch`: processes 0 and 1 hold the same part of the batch")
    error = compared(notes({"whole": "a"}, {"whole": "a"}, {"whole": "b"}), "global").error
    assert "processes 0 and 2 give different ones" in error


def test_shapes_that_make_no_batch_are_named_with_their_processes():
    found = notes({}, {}) | {7: Note(1, None, [("x", "float32[4,3]")], {})}
    error = compared(found, "local").error
    assert "x: float32[8,3] on processes 0, 1, float32[4,3] on process 7; y: int32[8]" in error
    leaves = [(f"x{i}", "float32[1]") for i in range(40)]
    error = compared(found | {7: Note(1, None, leaves, {})}, "local").error
    assert error.count("x") < 20
    assert "; and 39 more. Each must" in error


def test_a_shape_that_comes_in_different_steps():
    found = notes({}) | {1: Note(9, None, LEAVES, {})}
    assert "process 0 in step 1, process 1 in step 9." in compared(found, "local").error


def test_what_one_process_finds_out_alone_is_for_all():
    found = notes({}) | {1: Note(1, "`batch`: ...", [], {})}
    assert compared(found, "local") == Verdict(error="process 1: `batch`: ...")


def test_one_process_tells_nobody(mesh_of, monkeypatch):
    monkeypatch.delattr(_processes, "tell")
    step = js.make_train_step(loss, optax.sgd(0.1), sync="none", mesh=mesh_of({"replica": 2}))
    step(step.init(PARAMS), BATCHES[0])


PROGRAM = """
import json
import time
import warnings
import numpy as np
import optax
import jaxslowmo as js
from jaxslowmo.train.batches import _processes

mesh = js.make_mesh({"replica": 2})
said = {}

def run(name, *batches, late=0, **options):
    step = js.make_train_step(
        lambda p, b: ((b["x"] @ p["w"]) ** 2).mean(), optax.sgd(0.1),
        sync=js.local_sgd("replica", sync_every=99), mesh=mesh, **options,
    )
    state = step.init({"w": np.ones(3, np.float32)})
    time.sleep(late * rank)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            for batch in batches:
                state, metrics = step(state, {"x": batch})
                jax.block_until_ready(metrics)
            said[name] = [str(w.message) for w in found]
        except ValueError as error:
            said[name] = f"after {int(state.step.addressable_data(0)[0])}: {error}"

def rows(n, seed=rank):
    return np.random.default_rng(seed).normal(size=(n, 3)).astype(np.float32)

run("different", rows(4), rows(4, 0), rows(2))
run("alike", rows(4, 0), rows(4, 0), rows(2, 0))
run("global", rows(4, 0), rows(2, 0), host_batch="global")
run("global, different", rows(4), host_batch="global")
run("rows", rows(4 + rank))
run("later", rows(4), rows(4), rows(2 + rank))
run("none on one", rows(4 * (1 - rank)))
_processes.PATIENCE_SECONDS, _processes.HINT_SECONDS = 0.5, 0.1
run("late", rows(4), late=2)
run("one has that shape", rows(4), rows(4) if rank else rows(2))
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    printed = two_processes(PROGRAM, tmp_path_factory.mktemp("compared"))
    return [json.loads(text.splitlines()[-1]) for text in printed]


@pytest.mark.parametrize("name", ["different", "global"])
def test_nothing_is_said_of_batches_that_fit(said, name):
    assert [process[name] for process in said] == [[], []]


def test_both_warn_once_of_the_same_data(said):
    for process in said:
        (warning,) = process["alike"]
        assert "processes 0, 1 give the same data" in warning


@pytest.mark.parametrize(
    ("name", "wanted"),
    {
        "global, different": "after 0: .*takes the same whole batch .* processes 0 and 1 give",
        "rows": r"after 0: .*x: float32\[8,3\] on process 0, float32\[10,3\] on process 1",
        "later": r"after 2: .*x: float32\[4,3\] on process 0, float32\[6,3\] on process 1",
        "none on one": r"after 0: .*multiple of 1, .*, got x \(0, 3\)",
    }.items(),
)
def test_both_say_the_same_line(said, name, wanted):
    first, second = (process[name] for process in said)
    assert first.replace("process 1: ", "") == second
    assert re.match(wanted, first)
    assert "\n" not in first
    assert len(first) < 400


def test_one_that_is_late_is_not_waited_for_without_end(said):
    (of_first,), (of_late,) = (process["late"] for process in said)
    assert of_first == of_late
    assert of_first.startswith("`batch`: process 1 did not report within 0.5 s")


def test_a_shape_that_only_one_has_is_told(said):
    first, second = (process["one has that shape"] for process in said)
    early, late = first
    assert re.match("`batch`: in step 2 .* another shape .* process 1 .* none within 0.1 s", early)
    assert "process 1 did not report within 0.5 s" in late
    assert second == []
