"""`jaxslowmo sample`: writes text, byte by byte, with the model of a run."""

import functools
import sys
import unicodedata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxslowmo as js
from jaxslowmo.checkpoint import CheckpointError, Checkpoints, consensus_extra, load_consensus
from jaxslowmo.models import (
    GPTConfig,
    gpt_logits_fn,
    gpt_loss_fn,
    init_gpt,
)

from ._errors import CommandError, usage_errors
from .config._commands import SampleConfig
from .config._mesh import MODEL_AXES
from .run._recipes import Form, build_algorithm, config_of, saved_config, saved_form
from .run._run_folder import RunFolder, is_export


def sample(config: SampleConfig) -> int:
    """Print the prompt and the text that the model adds, and return the exit code.

    Raises:
      CommandError: there is no model, or it cannot be read.
    """
    with usage_errors():
        model, params = find_model(config.run, config.step)
    print(_shown(generate(model, params, config), sys.stdout.encoding or "utf-8"))
    return 0


def _shown(text: bytes, encoding: str) -> str:
    """Return text for stdout, with replacements for invalid bytes and control characters."""
    letters = text.decode("utf-8", "replace")
    plain = "".join("\ufffd" if _steers(letter) else letter for letter in letters)
    return plain.encode(encoding, "replace").decode(encoding)


def _steers(letter: str) -> bool:
    return unicodedata.category(letter) == "Cc" and not letter.isspace()


def generate(model: GPTConfig, params: Any, config: SampleConfig) -> bytes:
    """Return the prompt and the bytes that the model adds.

    One program writes all bytes: a scan over a window of `context_length` bytes, which slides when
    it is full.

    Args:
      model: shape of the model.
      params: one copy of its parameters.
      config: the prompt, the number of bytes, and how they are drawn.
    """
    # Bytes from the shell that are no UTF-8 are kept.
    prompt = config.prompt.encode("utf-8", "surrogateescape")
    seen = np.frombuffer(prompt, np.uint8)[-model.context_length :]
    window = np.zeros(model.context_length, np.int32)
    window[: seen.size] = seen
    keys = jax.random.split(jax.random.key(config.seed), config.tokens)
    logits_fn = gpt_logits_fn(model)

    def write(carry: tuple[jax.Array, jax.Array], key: jax.Array) -> tuple[Any, jax.Array]:
        window, size = carry
        # Attention is causal, so the zeros after the text have no effect.
        logits = logits_fn(params, window[None])[0, size - 1]
        new = _drawn(logits, key, config)
        is_full = size == window.size
        window = jnp.where(is_full, jnp.roll(window, -1), window)
        size = jnp.where(is_full, size, size + 1)
        return (window.at[size - 1].set(new), size), new

    _, written = jax.jit(lambda *start: jax.lax.scan(write, start, keys))(
        jnp.asarray(window), jnp.asarray(seen.size)
    )
    return prompt + np.asarray(written, np.uint8).tobytes()


def _drawn(logits: jax.Array, key: jax.Array, config: SampleConfig) -> jax.Array:
    if config.temperature == 0:
        return jnp.argmax(logits).astype(jnp.int32)
    if config.top_k:
        least = jax.lax.top_k(logits, config.top_k)[0][-1]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    # Not logits / temperature, which a tiny temperature would make infinite.
    scaled = (logits - logits.max()) / config.temperature
    return jax.random.categorical(key, scaled).astype(jnp.int32)


def find_model(run: Path, step: int | None) -> tuple[GPTConfig, Any]:
    """Return shape and parameters of the model of a run.

    Args:
      run: folder of a run, from which the newest checkpoint is read, else the exported model; or
        the folder of an exported model.
      step: step of the checkpoint; None: the newest.

    Raises:
      CommandError: there is no model, or it cannot be read.
    """
    if not run.is_dir():
        raise CommandError(f"RUN must be the folder of a run or of an exported model, got {run}")
    folder = RunFolder(run)
    try:
        if step is not None or folder.saved_steps():
            return _of_checkpoint(folder.checkpoints, step)
        for path in (run, folder.model):
            if is_export(path):
                return _of_export(path)
    except CheckpointError as error:
        older = error.older_step
        hint = "" if older is None else f" --step {older} takes the one before."
        raise CommandError(f"{error.reason}{hint}") from error
    raise CommandError(
        f"{run} holds no model: neither checkpoints (train with --checkpoint-every) nor an "
        "exported one (--export)"
    )


def _of_checkpoint(folder: Path, step: int | None) -> tuple[GPTConfig, Any]:
    with Checkpoints(folder) as checkpoints:
        extra = checkpoints.extra(step=step)
        if "config" not in extra:
            raise CommandError(f"the checkpoints in {folder} are not of jaxslowmo train")
        config = saved_config(extra)
        form = Form(config_of(config))
        model = form.config
        # Each replica on one virtual device, whatever axes split the model in training.
        axes = {name: n for name, n in config.axes.items() if name not in MODEL_AXES}
        mesh = js.virtual_mesh(axes)
        algorithm = build_algorithm(config)
        train_step = algorithm.make_step(gpt_loss_fn(model), config, mesh=mesh)
        form_fn = functools.partial(saved_form, now=form)
        restored = checkpoints.restore(train_step, init_gpt(model), step=step, saved_form=form_fn)
    return model, train_step.consensus(restored.state)


def _of_export(folder: Path) -> tuple[GPTConfig, Any]:
    shape = consensus_extra(folder).get("model")
    if shape is None:
        raise CommandError(
            f"{folder} does not say what model it is: train with --resume --export, which exports "
            "it again"
        )
    model = GPTConfig(**shape)
    return model, load_consensus(folder, like=init_gpt(model))
