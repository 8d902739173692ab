"""What the language models and their text refuse."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from jaxslowmo import data, models
from support.refusals import Refusal, each
from support.wrong import wrong

TINY = models.GPTConfig(num_layers=1, num_heads=2, embed_dim=16, context_length=8)
SHORT = jnp.zeros((2, 8), jnp.uint8)
MESH = AbstractMesh((2, 2, 2), ("replica", "fsdp", "tensor"))


def config(**change):
    return dataclasses.replace(TINY, **change)


def specs(*rules):
    return models.gpt_param_specs(TINY, MESH, rules)


def split(replicas=2, validation_every=10, files=4):
    documents = tuple(data.Document(f"{i}", b"text" * i) for i in range(1, 1 + files))
    return data.split_corpus(
        data.Corpus("f", documents), replicas, validation_every=validation_every
    )


def batches(sizes=(60, 50), **options):
    given = {"batch_size": 3, "window": 5, "seed": 0, **options}
    return data.TextBatches([np.zeros(size, np.uint8) for size in sizes], **given)


def resumed(**change):
    iterator = batches()
    return iterator.set_state(iterator.get_state() | change)


def held_out(size=5, num_batches=1):
    text = np.zeros(size, np.uint8)
    return data.validation_batches(text, num_batches=num_batches, batch_size=1, window=6)


ROWS = {
    **wrong(config, num_layers=0, num_heads=3, dtype="float64", attention="flash"),
    "preset": Refusal(lambda: models.gpt_preset("2b"), "`preset`", "2b"),
    **wrong(split, replicas=0, validation_every=1),
    **wrong(batches, seed=-1, batch_size=0, window=1, replicas=(-1, 0)),
    **wrong(held_out, num_batches=0),
    "window": Refusal(
        lambda: models.gpt_loss_fn(TINY)(models.init_gpt(TINY), SHORT), "`batch`", (2, 8)
    ),
    "a name of rules": Refusal(lambda: specs(("embd", "fsdp")), "`rules`", "embd"),
    "no axis": Refusal(
        lambda: models.gpt_rules(AbstractMesh((2,), ("replica",))), "`mesh`", "replica"
    ),
    "no such path": Refusal(lambda: data.read_corpus("/nowhere"), "`data`", "/nowhere"),
    "a replica too many": Refusal(lambda: split(4), "`replicas`", "most 3"),
    "a short share": Refusal(lambda: batches((51, 50), window=17), "51 bytes", "replica 1 of 2"),
    "another seed": Refusal(lambda: resumed(seed=1), "seed=0", 1),
}


@each(ROWS)
def test_refused(refusal):
    refusal.check()


@pytest.mark.parametrize(("path", "reason"), [("", "all 1"), ("a", "binary")])
def test_what_holds_no_text_is_refused(tmp_path, path, reason):
    (tmp_path / "a").write_bytes(b"\0")
    with pytest.raises(ValueError, match=reason):
        data.read_corpus(tmp_path / path)
