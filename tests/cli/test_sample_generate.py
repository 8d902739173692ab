"""Bytes that a model writes: against a loop that asks the model for one byte at a time."""

import jax
import numpy as np
import pytest

from jaxslowmo.cli import _sample
from jaxslowmo.cli._sample import generate
from jaxslowmo.cli.config._commands import SampleConfig
from jaxslowmo.models import GPTConfig, gpt_logits_fn, init_gpt

MODEL = GPTConfig(num_layers=1, num_heads=2, embed_dim=16, context_length=8)


@pytest.fixture(scope="module")
def params():
    # Larger than at the start of a training, so that bytes differ in how likely they are.
    return jax.tree.map(lambda x: 10 * x, init_gpt(MODEL, seed=1))


def one_by_one(params, prompt, tokens):
    """The likeliest bytes, each from the last `context_length` of the text and nothing else."""
    text, logits_fn = list(prompt), jax.jit(gpt_logits_fn(MODEL))
    for _ in range(tokens):
        seen = np.array([text[-MODEL.context_length :]])
        text.append(int(np.argmax(logits_fn(params, seen)[0, -1])))
    return bytes(text)


@pytest.mark.parametrize("prompt", ["a", "hello wo", "a prompt that is longer", "äö"])
def test_the_likeliest_bytes_of_a_window_that_slides(params, prompt):
    config = SampleConfig(prompt=prompt, tokens=12, temperature=0)
    assert generate(MODEL, params, config) == one_by_one(params, prompt.encode(), 12)


def test_drawing(params):
    def text(**given):
        return generate(MODEL, params, SampleConfig(**{"tokens": 30, **given}))

    likeliest = text(temperature=0)
    assert text(top_k=1, temperature=2) == text(temperature=1e-30) == likeliest
    assert text(seed=3) == text(seed=3, top_k=256) != text(seed=4)
    assert len(set(text(temperature=50, tokens=300))) > 100  # nearly all the same to it
    assert len(set(text(temperature=1e30, top_k=2, tokens=300))) > 1


def test_of_few_candidates_no_other_is_drawn(params):
    config = SampleConfig(temperature=9, top_k=3, tokens=40)
    text, logits_fn = generate(MODEL, params, config), jax.jit(gpt_logits_fn(MODEL))
    for i in range(1, len(text)):
        seen = np.array([list(text[:i][-MODEL.context_length :])])
        ranked = np.argsort(np.asarray(logits_fn(params, seen)[0, -1]))
        assert text[i] in ranked[-3:]


def test_the_model_is_traced_once(params, monkeypatch):
    traced = []

    def counted(config):
        logits_fn = gpt_logits_fn(config)
        return lambda *args: traced.append(1) or logits_fn(*args)

    monkeypatch.setattr(_sample, "gpt_logits_fn", counted)
    generate(MODEL, params, SampleConfig(tokens=64))
    assert len(traced) <= 2  # a scan may look twice at its body


def test_bytes_of_a_shell_that_are_no_text(params):
    config = SampleConfig(prompt=b"\xffa".decode("utf-8", "surrogateescape"), tokens=1)
    assert generate(MODEL, params, config)[:2] == b"\xffa"
