"""Exchanges beside training: where they end, and what becomes of those that do not land."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from islands.test_island import of_one_job, train, train_two, whole
from islands.together import batch, loss, params, run_together
from jaxslowmo.islands import IslandsError
from support.replay import header, objects, replay
from support.waiting import wait_until


@pytest.mark.parametrize(("delay", "merge"), [(1, 0.0), (3, 0.3)])
def test_islands_with_a_delay_end_where_one_job_with_it_ends(delay, merge, tmp_path):
    options = {"delay": delay, "merge": merge}
    ends = train_two(tmp_path, 2, periods=8, quorum=2, **options)
    job = of_one_job(js.diloco, 4, 8, **options)
    blocking = of_one_job(js.diloco, 4, 8)
    for i, (_, state, _) in enumerate(ends):
        for one, expected, other in zip(whole(state.params), job, blocking, strict=True):
            part = slice(2 * i, 2 * i + 2)
            np.testing.assert_allclose(one, expected[part], rtol=0, atol=4e-6)
            assert not np.allclose(one, other[part], rtol=0, atol=1e-4)


def test_a_loop_trains_while_the_others_are_waited_for(tmp_path):
    """The hook returns at once where it takes what is sent; else this loop would never end."""
    island = js.islands.join(str(tmp_path), name="a", sync_every=4, delay=2, quorum=2)
    step = js.make_train_step(
        loss, optax.sgd(0.05), mesh=js.virtual_mesh({"replica": 2}), sync=island.transform()
    )
    state = island.exchange(step.init(params()))
    batches = [batch(t, slice(0, 2)) for t in range(1, 4)]
    *_, last = js.train_loop(step, state, batches, hooks=[island])
    assert (last.step, island.round) == (3, 0)
    other = functools.partial(train, tmp_path, "b", slice(2, 4), periods=1, quorum=2)
    state, _ = step(last.state, batch(4, slice(0, 2)))
    _, state = run_together([other, functools.partial(island.exchange, state)])
    assert island.round == 1


class Trained:
    """An island of one number, from which each update takes 1."""

    def __init__(
        self, url: Path, name: str, deadline: float, state: Any = None, **options: Any
    ) -> None:
        self.island = js.islands.join(
            str(url), name=name, late="carry", deadline_seconds=deadline, **options
        )
        self.step = js.make_train_step(
            lambda params, batch: jnp.sum(params["w"][None] * batch),
            optax.sgd(1.0),
            mesh=js.virtual_mesh({"replica": 1}),
            sync=self.island.transform(),
        )
        start = self.step.init({"w": np.zeros(1, np.float32)})
        self.state = self.island.exchange(start if state is None else state)

    def train(self) -> None:
        self.state, _ = self.step(self.state, np.ones((1, 1), np.float32))

    def exchange(self) -> None:
        self.state = self.island.exchange(self.state)


def delayed(url: Any, name: str, deadline: float, **options: Any) -> Trained:
    """Return an island of one number whose first of two updates is taken."""
    return Trained(url, name, deadline, sync_every=2, delay=1, **options)


def rounds_of(url: Any) -> dict[str, Any]:
    found = replay(objects(str(url)))
    assert not found["wrong"]
    return found


def test_what_a_store_did_not_answer_beside_training_is_sent_with_the_next_exchange(
    tmp_path, monkeypatch
):
    island = delayed(tmp_path, "a", 0.3)
    bucket: Any = island.island._store._object_store  # pyright: ignore
    put = bucket.put

    def unanswered(key: str, data: bytes) -> None:
        put(key, data)
        if "/part-" in key:
            raise OSError("no answer")

    monkeypatch.setattr(bucket, "put", unanswered)
    island.train()
    island.exchange()
    island.train()
    island.exchange()
    np.testing.assert_array_equal(island.state.params["w"], [[-2.0]])  # nothing has landed
    monkeypatch.undo()
    for _ in range(2):
        island.train()
        island.exchange()
    # The part of the first update was there; the two after it are kept, the fourth is not.
    assert rounds_of(tmp_path)["islands"] == [["a"]]
    np.testing.assert_allclose(island.state.params["w"], [[-0.7 * 1.9 - 2.0]], rtol=1e-6)


@pytest.mark.parametrize(("is_decided", "merge"), [(True, 0.5), (False, 0.0)])
def test_a_process_that_ends_with_an_exchange_under_way_loses_nothing_that_was_sent(
    is_decided, merge, tmp_path, said
):
    quorum = 1 if is_decided else 2
    island = delayed(tmp_path, "a", 60.0, quorum=quorum)
    island.train()
    island.exchange()
    island.train()
    background = island.island._background
    assert background is not None
    key = "manifest.json" if is_decided else "/part-a-"
    while not any(key in x for x in objects(str(tmp_path))):
        assert not background.outcome.done() or is_decided
    if is_decided:
        background.outcome.result(60)
    # Its checkpoint is of the second update, beside which the first one was sent.
    again = delayed(tmp_path, "a", 60.0, quorum=1, merge=merge, state=island.state)
    anchor = float(again.state.params["w"][0, 0])
    if is_decided:
        assert any("an earlier process has contributed" in line for line in said)
        # As it would have landed, with its share of the second update.
        np.testing.assert_allclose(anchor, merge * -2.0 + (1 - merge) * -0.7 * 1.9, rtol=1e-6)
    assert again.island.round == 1
    parts = [x for x in objects(str(tmp_path)) if "/part-a-" in x]
    assert len(parts) == (1 if is_decided else 2)
    if not is_decided:  # one part with both updates takes the place of the first
        np.testing.assert_allclose(anchor, -0.7 * 1.9 * 2, rtol=1e-6)
        assert len(rounds_of(tmp_path)["left"]) == 1


def test_an_error_beside_training_is_raised_where_the_exchange_lands(tmp_path):
    island = delayed(tmp_path, "a", 60.0)
    delayed(tmp_path, "a", 60.0)
    island.train()
    island.exchange()
    island.train()
    with pytest.raises(IslandsError, match="another process has joined as 'a'"):
        island.exchange()


@functools.cache
def step_along_one() -> Any:
    mesh, sync = js.virtual_mesh({"replica": 1}), js.islands.transform()
    return js.make_train_step(
        lambda p, b: jnp.sum(p["w"][None] * b), optax.sgd(1.0), mesh=mesh, sync=sync
    )


class OfFour:
    """An island of one number that exchanges after four updates, with its round after each."""

    def __init__(self, url: Any, name: str, *, state: Any = None, **options: Any) -> None:
        options = {"sync_every": 4, "merge": 0.5, "deadline_seconds": 0.1} | options
        self.island = js.islands.join(str(url), name=name, **options)
        new = step_along_one().init({"w": np.zeros(1, np.float32)})
        self.state = self.island.exchange(new if state is None else state)
        self.rounds = {int(self.state.step[0]): self.island.round}

    def train(self, end: int, calls: Callable[[int], bool] | None = None) -> None:
        for t in range(max(self.rounds) + 1, end + 1):
            self.state, _ = step_along_one()(self.state, np.ones((1, 1), np.float32))
            if (calls or self.island.due)(t):
                self.state = self.island.exchange(self.state)
            self.rounds[t] = self.island.round


def counted_parts(url: Any) -> dict[int, int]:
    """Return the update that was sent in each round that counted a part of island a."""
    found = objects(str(url))
    manifests = [json.loads(data) for key, data in found.items() if key.endswith("manifest.json")]
    heads = [header(found[part]) for manifest in manifests for part in manifest["parts"]]
    return {head["round"]: head["updates"] for head in heads if head["island"] == "a"}


@pytest.mark.parametrize("delay", [1, 2, 3])
@pytest.mark.parametrize("fate", ["counted", "open", "missed"])
def test_an_island_that_stopped_before_it_landed_goes_on_as_one_that_did_not_stop(
    fate, delay, tmp_path
):
    """Until it is back its part was counted, or its round is open, or closed without it."""
    taken = 4 - delay
    whole = OfFour(tmp_path / "whole", "a", delay=delay)
    whole.train(12)
    assert counted_parts(tmp_path / "whole") == {0: taken, 1: taken + 4, 2: taken + 8}
    for stop in range(taken, 5):
        url = tmp_path / f"{stop}"
        before = OfFour(url, "a", delay=delay, quorum=2 if fate == "open" else 1)
        before.train(stop, lambda t: t == taken and fate != "missed")
        if fate == "missed":
            OfFour(url, "b").train(4)
        elif fate == "open":
            wait_until(lambda url=url: [*url.glob("rounds/*/part-a-*")])
        else:
            before.island._background.outcome.result(60)
        again = OfFour(url, "a", delay=delay, state=before.state)
        again.train(12)
        assert again.rounds == {t: n for t, n in whole.rounds.items() if t >= stop}
        # A part in an open round is replaced by one with all updates since.
        first = {"counted": {0: taken}, "open": {0: taken if stop == taken else 4}, "missed": {}}
        assert counted_parts(url) == {**first[fate], 1: taken + 4, 2: taken + 8}
        if fate == "counted":
            np.testing.assert_array_equal(again.state.params["w"], whole.state.params["w"])


def test_what_an_island_carries_over_counts_though_rounds_are_too_short_for_it(tmp_path):
    first, late = Trained(tmp_path, "a", 0.1), Trained(tmp_path, "b", 0.1)
    late.train()
    late.train()
    for _ in range(2):
        first.train()
        first.exchange()
        late.exchange()  # the second time it sends its updates at once, to the open round
    first.train()
    first.exchange()
    late.exchange()
    assert rounds_of(tmp_path)["islands"] == [["a"], ["a"], ["a", "b"]]
    # Outer steps along 1, 1 and (1 + 2) / 2, of SGD with Nesterov momentum.
    anchor = velocity = 0.0
    for away in (1.0, 1.0, 1.5):
        velocity = 0.9 * velocity + away
        anchor -= 0.7 * (0.9 * velocity + away)
    np.testing.assert_allclose(first.state.params["w"], [[anchor]], rtol=1e-6)
    np.testing.assert_array_equal(late.state.params["w"], first.state.params["w"])
