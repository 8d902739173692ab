"""Summaries as tables."""

from jaxslowmo.cli._output import compare_rows


def test_rows_average_over_the_seeds_that_finished():
    def run(algorithm, seed, loss, sent, status="finished"):
        return {
            "algorithm": algorithm, "seed": seed, "status": status, "validation_loss": loss,
            "bytes_sent": sent, "tokens_per_second": 10.0,
        }  # fmt: skip

    rows = compare_rows(
        [
            run("a", 0, 2.0, 100),
            run("a", 1, 3.0, 100),
            run("b", 0, 2.5, 25),
            run("b", 1, None, 5, "diverged"),
        ]
    )
    assert rows[0] == {
        "algorithm": "a", "seeds": [0, 1], "validation_loss": 2.5, "spread": 1.0,
        "bytes_sent": 100.0, "ratio": 1.0, "tokens_per_second": 10.0, "diverged": 0,
    }  # fmt: skip
    assert rows[1]["validation_loss"] == 2.5
    assert rows[1]["spread"] is None
    assert (rows[1]["ratio"], rows[1]["diverged"]) == (0.25, 1)
    assert compare_rows([]) == []
