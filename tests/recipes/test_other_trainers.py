"""The page "In other trainers": each library's program, and what few changed lines make of it."""

import difflib
import functools
from typing import Any

import jax
import numpy as np
import pytest

import jaxslowmo as js
from recipes.doc_blocks import fresh, run, sections

PAGE, SETTING = "other-trainers", "Setting"
LIBRARIES = ["flax linen", "flax nnx", "Equinox", "Keras"]
REPLICAS, UPDATES = 4, 8

pytestmark = pytest.mark.xdist_group("other trainers")  # one process runs the page


def trained(title: str, changes: dict[str, str], **names: Any) -> dict[str, Any]:
    """The names that a program leaves after a few updates, its texts and settings replaced."""
    names = fresh(PAGE, SETTING) | names
    names["batches"] = names["batches"][:UPDATES]
    text = sections(PAGE)[title][1]
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    text = f"losses = []\n{text}    losses.append(loss)\n"
    exec(compile(text, f"{PAGE}: {title}", "exec"), names)
    return names


def assert_close(tree: Any, expected: Any, tolerance: float = 1e-4) -> None:
    for x, y in zip(*map(jax.tree.leaves, jax.device_get((tree, expected))), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def leaves(names: dict[str, Any]) -> list[Any]:
    """Losses and consensus of a run."""
    replicas, step = names["replicas"], names["step"]
    return [np.stack(names["losses"]), *jax.tree.leaves(step.consensus(replicas))]


@pytest.mark.parametrize("title", LIBRARIES)
def test_at_most_15_lines_change(title):
    before, after, *_ = (block.splitlines() for block in sections(PAGE)[title])
    marks = [line[0] for line in difflib.ndiff(before, after)]
    assert 0 < marks.count("+") <= 15
    assert 0 < marks.count("-") <= 4


@pytest.mark.parametrize("title", LIBRARIES)
def test_the_consensus_has_learnt(title):
    names = run(PAGE, SETTING, title)
    predicted = np.reshape(names["predicted"], -1)
    assert np.mean((predicted - names["y"][0]) ** 2) < 0.05 * np.var(names["y"][0])


# Adam with its small default makes steps of what is rounding in the gradient of a dead unit.
STABLE = {
    "Keras": {"Adam(0.05)": "Adam(0.05, epsilon=1e-3)"},
    "flax linen": {"adam(0.05)": "adam(0.05, eps=1e-3)"},
}


@pytest.mark.parametrize("title", ["flax linen", "Keras"])
def test_replicas_train_alike_wherever_they_run(title, monkeypatch):
    """So does a scan of their updates. Masks of dropout are those of the replica's number."""
    changes = STABLE[title]
    virtual = js.virtual_mesh({"replica": REPLICAS})
    expected = leaves(trained(title, changes=changes, mesh=virtual))
    host = functools.partial(js.with_exchange, mode="host", map_with="shard_map")
    monkeypatch.setattr(js, "with_exchange", host)
    mesh = js.make_mesh({"replica": REPLICAS, "fsdp": 2})
    names = trained(title, changes=changes, mesh=mesh)
    assert_close(leaves(names), expected)
    step = names["step"]
    batches = jax.tree.map(lambda *x: np.stack(x), *names["batches"])
    names["replicas"], names["losses"] = step.scan(step.init(names["state"]), batches)
    assert_close(leaves(names), expected)
