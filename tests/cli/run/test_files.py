"""The files of a run that is resumed, and of a process that leaves them to another."""

import json

from jaxslowmo.cli.config._train import TrainConfig
from jaxslowmo.cli.run._files import RunFiles


def test_later_records_and_a_line_that_was_cut_off_are_dropped(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step}) for step in (0, 1, 2, 3)]
    for after, kept in ((0, []), (2, [0, 1, 2])):
        metrics.write_text("\n".join([*lines, '{"step": 2, "lo']))
        with RunFiles(tmp_path, TrainConfig(), writes=True, after=after) as files:
            assert [record["step"] for record in files.records] == kept
            files.write_record({"step": 9, "loss": float("nan")})
            assert metrics.read_text().endswith('{"step": 9, "loss": null}\n')  # at once
        files.finish({"status": "finished"}, None)
        found = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
        assert found == [*kept, 9]
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json", "metrics.jsonl", "summary.json",
    }  # fmt: skip


def test_another_process_writes_nothing(tmp_path):
    with RunFiles(tmp_path / "out", TrainConfig(), writes=False, after=0) as files:
        files.write_record({"step": 1})
    files.finish({}, None)
    assert not (tmp_path / "out").exists()
