"""The DLRM example as one command: it learns with replicas, sharded tables and ids ahead."""

import json

import numpy as np
import pytest


@pytest.mark.usefixtures("standard_promotion")  # of optax's schedule
def test_the_command_trains_and_writes_what_it_measured(
    command, real_flights, monkeypatch, tmp_path, capsys
):
    import flights

    parts = (part.rows(slice(None, None, 40)) for part in real_flights[:3])
    some = flights.Split(*parts, real_flights.num_rows)
    monkeypatch.setattr(flights, "split", lambda: some)
    command.main(
        mode="patched",
        shard="row",
        replicas=2,
        algorithm="local_sgd",
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
    with pytest.raises(SystemExit, match="--replicas"):
        command.main(replicas=3)
