"""The DLRM example as one command: it learns whatever is sent ahead, and however tables lie."""

import json

import numpy as np
import pytest
import typer

from support.exhaustive import sweep

CASES = [
    ("plain", "row", 1, "all_reduce"),
    ("exact", "table", 1, "all_reduce"),
    ("patched", "row", 2, "local_sgd"),
    ("patched", "column", 4, "slowmo"),
    ("stale", "row", 2, "all_reduce"),
]


@pytest.mark.parametrize(
    ("mode", "shard", "replicas", "algorithm"),
    sweep(CASES, lambda mode, shard, *_: (mode, shard) == ("patched", "row")),
)
def test_the_command_trains_and_writes_what_it_measured(
    command, real_flights, monkeypatch, tmp_path, capsys, mode, shard, replicas, algorithm
):
    import flights

    parts = (part.rows(slice(None, None, 40)) for part in real_flights[:3])
    some = flights.Split(*parts, real_flights.num_rows)
    monkeypatch.setattr(flights, "split", lambda: some)
    command.main(
        mode=mode,
        shard=shard,
        replicas=replicas,
        algorithm=algorithm,
        batch_size=256,
        dim=8,
        learning_rate=1e-2,
        table_rate=0.1,
        steps=20,
        scores=2,
        tries=0,
        out=tmp_path,
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["steps"] == [10, 20]
    losses = result["losses"]
    assert len(losses) == 20
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    assert min(result["validation"][-1], result["test"][-1]) > 0.55
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert f"{result['test'][-1]:.4f}" in capsys.readouterr().out


def test_replicas_that_do_not_divide_the_devices_are_refused(command):
    with pytest.raises(typer.BadParameter, match=r"--replicas must divide 8, got 3\."):
        command.main(replicas=3)
