"""Do the batches that several processes give fit together?"""

import json
import re

from jaxslowmo.train.batches._processes import Note, Verdict, compared
from support.pairs import two_processes

LEAVES = [("x", "float32[8,3]"), ("y", "int32[8]")]


def notes(*digests, **changed):
    return {i: Note(**({"call": 1, "problem": None, "leaves": LEAVES, "digests": d} | changed))
            for i, d in enumerate(digests)}  # fmt: skip


def test_what_is_said_of_notes():
    """Of parts that differ nothing; of equal ones a warning, of what makes no batch an error."""
    assert compared(notes({"0": "a"}, {"1": "b"}), "local") == Verdict()
    assert compared(notes({"0": "a"}, {"0": "a"}), "local") == Verdict()  # of one part
    assert compared(notes({}, {}), "local") == Verdict()  # later, values are not compared
    assert compared(notes({"whole": "a"}, {"whole": "a"}), "global") == Verdict()
    alike = compared(notes({"0": "a"}, {"1": "b"}, {"2": "a"}), "local")
    assert alike.error is None
    assert "processes 0, 2 give the same data" in alike.warning
    same_part = notes({"0": "a", "1": "b"}, {"1": "c", "2": "d"})
    other_shape = {7: Note(1, None, [("x", "float32[4,3]")], {})}
    many = {7: Note(1, None, [(f"x{i}", "float32[1]") for i in range(40)], {})}
    for given, how, wanted in (
        (same_part, "local", "processes 0 and 1 hold the same part"),
        (notes(*({"whole": x} for x in "aab")), "global", "processes 0 and 2"),
        (
            notes({}, {}) | other_shape,
            "local",
            "x: float32[8,3] on processes 0, 1, float32[4,3] on",
        ),
        (notes({}, {}) | many, "local", "; and 39 more. Each must"),
        (notes({}) | {1: Note(9, None, LEAVES, {})}, "local", "0 in step 1, process 1 in step 9."),
        (notes({}) | {1: Note(1, "`batch`: ...", [], {})}, "local", "process 1: `batch`: ..."),
    ):
        assert wanted in compared(given, how).error


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
run("late", rows(4), late=1.2)
run("one has that shape", rows(4), rows(4) if rank else rows(2))
print(json.dumps(said))
"""


MATCHES = {
    "global, different": "after 0: .*processes 0 and 1 give",
    "rows": r"after 0: .*x: float32\[8,3\] on process 0, float32\[10,3\] on process 1",
    "later": r"after 2: .*x: float32\[4,3\] on process 0, float32\[6,3\] on process 1",
    "none on one": r"after 0: .*multiple of 1, .*, got x \(0, 3\)",
}


def test_what_two_processes_say(tmp_path):
    """The same on both, in one line; of one that is late, or alone with a shape, a warning."""
    printed = two_processes(PROGRAM, tmp_path)
    both = [json.loads(text.splitlines()[-1]) for text in printed]
    for said in both:
        assert said["different"] == said["global"] == []
        (warning,) = said["alike"]
        assert "processes 0, 1 give the same data" in warning
        for name, wanted in MATCHES.items():
            assert re.match(wanted, said[name].replace("process 1: ", "")), said[name]
            assert "\n" not in said[name]
        (late,) = said["late"]
        assert "process 1 did not report within 0.5 s" in late
    early, late = both[0]["one has that shape"]
    assert re.match("`batch`: in step 2 .*process 1 .*0.1 s", early)
    assert "process 1 did not report within 0.5 s" in late
    assert both[1]["one has that shape"] == []
