"""MaxText's checkpoints of a run with exchanges: all replicas, and one model that MaxText reads."""

import numpy as np
import pytest
from maxtext.trainers.pre_train import train as its_own
from runs import EXCHANGES, losses, other_batches, run

import train

OPTIONS = {"enable_checkpointing": True, "async_checkpointing": False, "checkpoint_period": 100}
TESTED = {"eval_interval": 3, "eval_steps": 1}


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_go_on_from_a_checkpoint(exchange, tmp_path):
    options = EXCHANGES[exchange] | {"base_output_directory": tmp_path, "run_name": "cut"}
    steps = options["steps"]
    whole = losses(run(train.main, **options))
    schedule = {"learning_rate_schedule_steps": steps}
    run(train.main, **options | OPTIONS | schedule | {"steps": 7})
    rest = losses(run(train.main, **options | OPTIONS | schedule))
    np.testing.assert_array_equal(rest, whole[7:])


def test_other_runs_begin_with_the_mean_model(tmp_path):
    options = EXCHANGES["DiLoCo"] | {"base_output_directory": tmp_path, "steps": 4}
    with other_batches():
        reports = run(train.main, **options | OPTIONS | TESTED | {"run_name": "replicas"})
        path = tmp_path / "replicas" / "checkpoints" / "3" / "items"
        alone = {"ici_diloco_parallelism": 1, "ici_fsdp_parallelism": 8, "run_name": "one"}
        alone["load_parameters_path"] = path
        of_one = losses(run(its_own.main, **options | alone))[0]
        more = {"ici_diloco_parallelism": 4, "ici_fsdp_parallelism": 2, "run_name": "more"}
        more |= {"load_full_state_path": path, "steps": 6}
        of_more = losses(run(train.main, **options | OPTIONS | more))
    tested = [r["eval/avg_loss"] for r in reports if "eval/total_weights" in r]
    np.testing.assert_allclose([of_one, of_more[0]], tested[-1], rtol=1e-6)
    assert len(of_more) == 2  # updates 4 and 5
    assert abs(of_one - losses(reports)[3]) > 1e-3  # before update 3 parameters were others
