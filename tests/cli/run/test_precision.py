"""`--dtype`: what the model computes in, and the scale of the loss that float16 needs."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from jaxslowmo.cli.config._training import train_config
from jaxslowmo.cli.run._model import policy_of, scaled
from jaxslowmo.gradients.precision import computing_in
from jaxslowmo.models import gpt_loss_fn, gpt_preset, init_gpt
from jaxslowmo.tracing import as_full_loss


def test_the_model_computes_what_it_did_without_a_policy():
    """So that runs of earlier versions go on as they were."""
    model = gpt_preset("tiny", dtype="bfloat16")
    params, batch = init_gpt(model), jnp.arange(34, dtype=jnp.uint8).reshape(2, 17)
    plain = as_full_loss(gpt_loss_fn(model))
    cast = computing_in(policy_of(train_config({"preset": "tiny", "dtype": "bfloat16"})), plain)

    def gradients(loss):
        known = {"rng": jax.random.key(0), "model_state": ()}
        return jax.jit(jax.value_and_grad(lambda p: loss(p, batch, **known)[0]))(params)

    jax.tree.map(np.testing.assert_array_equal, gradients(cast), gradients(plain))


def test_only_float16_has_a_scale_and_not_if_it_is_0():
    def scale(**given):
        tx = scaled(optax.sgd(0.1), train_config(given))
        return js.loss_scale_of(tx.init({"w": jnp.zeros(1)}))

    assert scale(dtype="bfloat16") is None
    assert scale(dtype="float16", loss_scale=0) is None
    assert scale(dtype="float16", loss_scale=128.0) == 128
    with pytest.raises(ValueError, match=r"--loss-scale must be 0, or from 1 to 16777216, got 0.5"):
        train_config({"dtype": "float16", "loss_scale": 0.5})


GIVEN = (
    "train", "--preset", "tiny", "--dtype", "float16", "--loss-scale", 2**24, "--replicas", 2,
    "--execution", "virtual", "--algorithm", "local_sgd", "--log-every", 1, "--optimizer", "sgd",
    "--rate-schedule", "constant", "--warmup", 0,
)  # fmt: skip


def told(out, name):
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [record[name] for record in records if name in record]


def test_a_run_in_float16_tells_its_scale(call, text, tmp_path):
    out = tmp_path / "out"
    outcome = call(*GIVEN, "--data", text, "--out", out, "--steps", 6)
    assert (outcome.code, outcome.err) == (0, "")
    assert "updates skipped" in outcome.out
    scales, skipped = told(out, "loss_scale"), told(out, "skipped_updates")
    assert (len(scales), scales[0]) == (6, 2**24)
    assert sorted(scales, reverse=True) == scales
    assert sorted(skipped) == skipped
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["loss_scale"], summary["skipped_updates"]) == (scales[-1], skipped[-1])
    assert summary["skipped_updates"] > 0


@pytest.mark.exhaustive
def test_a_resumed_run_has_the_scale_that_it_had(call, text, tmp_path):
    outs = tmp_path / "whole", tmp_path / "resumed"
    for out, resume in ((outs[0], ()), (outs[1], ()), (outs[1], ("--resume",))):
        steps = 4 if out == outs[1] and not resume else 6
        given = "--data", text, "--out", out, "--steps", steps, "--checkpoint-every", 2
        assert call(*GIVEN, *given, *resume).code == 0
    for name in ("loss", "loss_scale", "skipped_updates"):
        assert told(outs[0], name) == told(outs[1], name)
