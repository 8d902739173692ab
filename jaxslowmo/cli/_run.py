"""One training run: everything between a configuration and its metrics."""

import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxslowmo as js
from jaxslowmo.data import TextBatches, read_corpus, split_corpus, validation_batches
from jaxslowmo.models import gpt_loss_fn, gpt_preset, init_gpt, num_parameters

from ._algorithms import build_algorithm
from ._bytes import ByteLedger
from ._config import TrainConfig
from ._devices import Placement
from ._interrupt import StopOnInterrupt
from ._output import JsonLines, write_json
from ._progress import Reporter
from ._record import Recorder

_EVAL_BYTES_PER_BATCH = 8192


@dataclasses.dataclass(frozen=True)
class Text:
    """What a run reads.

    Attributes:
        shares: one uint8 vector per replica.
        validation: uint8 (batches, windows, context_length + 1), the same for every run.
        description: in words.
    """

    shares: tuple[np.ndarray, ...]
    validation: np.ndarray
    description: str


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What a run left.

    Attributes:
        status: "finished", "interrupted" or "diverged".
        records: the lines of metrics.jsonl.
        summary: what summary.json holds.
        statistics: what statistics.json holds, where it was asked for.
    """

    status: str
    records: list[dict[str, Any]]
    summary: dict[str, Any]
    statistics: js.StepReport | None = None


def load_text(config: TrainConfig) -> Text:
    """Reads and divides the corpus of a configuration.

    Raises:
        ValueError: if there is not enough text, as in `jaxslowmo.data`.
    """
    context = gpt_preset(config.preset).context_length
    corpus = read_corpus(config.data)
    split = split_corpus(corpus, config.replicas)
    # Made only for its checks: every replica must hold a batch.
    TextBatches(split.shares, batch_size=config.batch, window=context + 1, seed=config.seed)
    skipped = f", {len(corpus.skipped)} skipped" if corpus.skipped else ""
    return Text(
        shares=split.shares,
        validation=validation_batches(
            split.validation,
            num_batches=config.eval_batches,
            batch_size=max(1, _EVAL_BYTES_PER_BATCH // context),
            window=context + 1,
        ),
        description=(
            f"{corpus.source}: {len(corpus.documents)} files{skipped}, "
            f"{corpus.num_bytes / 1e6:.1f} MB, {split.validation.size / 1e6:.2f} MB held out"
        ),
    )


class Job:
    """A configuration made ready: programs that several seeds share.

    Args:
        config: its seed is not used, `run` is given one.
        placement: where.
        text: what `load_text` returned.
        label: what the summary calls the algorithm; None: its name.

    Raises:
        ValueError: for arguments that the library refuses.
    """

    def __init__(
        self, config: TrainConfig, placement: Placement, text: Text, label: str | None = None
    ):
        self.config, self.placement, self._text = config, placement, text
        self.label = label or config.algorithm.algorithm
        self._model = gpt_preset(config.preset, dtype=config.dtype)
        self.num_parameters = num_parameters(self._model)
        loss_fn = gpt_loss_fn(self._model)
        self._algorithm = build_algorithm(config)
        self.step = js.make_train_step(
            loss_fn,
            self._algorithm.optimizer,
            sync=self._algorithm.sync,
            gradients=self._algorithm.gradients,
            mesh=placement.mesh,
            mode=config.mode,  # pyright: ignore[reportArgumentType]
            accumulate=config.accumulate,
        )
        # One batch after another, so that memory does not grow with their number.
        self._mean_loss = jax.jit(
            lambda params, batches: jax.lax.map(lambda b: loss_fn(params, b), batches).mean()
        )

    def evaluate(self, params: Any, model_state: Any = None) -> dict[str, float]:
        """Loss of one copy of the parameters on the held-out text, nats per byte."""
        del model_state
        # On one device: all would compute the same, and CPU devices share their cores.
        one = jax.tree.map(lambda x: x.addressable_data(0), params)
        return {"validation_loss": float(self._mean_loss(one, self._text.validation))}

    def run(self, seed: int, out: Path, reporter: Reporter) -> RunResult:
        """Trains from scratch and writes config.json, metrics.jsonl and summary.json to `out`.

        With `config.statistics` also statistics.json.

        Ctrl-C ends it after the step in progress, a loss that is not finite at once.
        """
        config = dataclasses.replace(self.config, seed=seed)
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "config.json", config)
        batches = TextBatches(
            self._text.shares,
            batch_size=config.batch,
            window=self._model.context_length + 1,
            seed=seed,
        )
        state = self.step.init(init_gpt(self._model, seed), seed=seed)
        ledger = ByteLedger.of_step(self.step, state, batches.batch(0))
        measured = (
            js.measured(self.step, rate=config.statistics_rate) if config.statistics else None
        )
        with JsonLines(out / "metrics.jsonl") as metrics, StopOnInterrupt() as stop:
            recorder = Recorder(config, ledger, self._algorithm.schedule, metrics.write, reporter)
            status = "interrupted"
            # The second Ctrl-C, in the middle of a step, raises.
            with contextlib.suppress(KeyboardInterrupt):
                status = self._loop(measured or self.step, state, batches, recorder, stop)
        summary = recorder.summary(status) | {
            "algorithm": self.label,
            "parameters": self.num_parameters,
            "placement": self.placement.description,
            "bytes_are_hypothetical": self.placement.is_virtual,
            "bytes_per_step_by_kind": ledger.by_kind,
            "data": self._text.description,
        }
        write_json(out / "summary.json", summary)
        statistics = measured.report() if measured else None
        if statistics:
            statistics.write(out / "statistics.json")
        return RunResult(status, recorder.records, summary, statistics)

    def _loop(
        self,
        step: js.TrainStep | js.MeasuredStep,
        state: js.TrainState,
        batches: TextBatches,
        recorder: Recorder,
        stop: StopOnInterrupt,
    ) -> str:
        config, mesh = self.config, self.placement.mesh
        evaluate = js.Evaluate(self.evaluate, mesh=mesh)
        recorder.start(self.evaluate(js.consensus(state.params, mesh=mesh)))
        for result in js.train_loop(step, state, batches, num_steps=config.steps):
            if self.placement.is_cpu:
                # Devices of a host share its threads: steps queued behind each other could hold
                # the threads that an earlier step's collective waits for.
                jax.block_until_ready(result.metrics)
            is_last = result.step == config.steps
            due = is_last or result.step % config.eval_every == 0
            if not recorder.step(
                result,
                evaluate=functools.partial(evaluate, result) if due else None,
                now=stop.requested,
            ):
                return "diverged"
            if stop.requested and not is_last:
                return "interrupted"
        return "finished"
