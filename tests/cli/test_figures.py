"""The picture of a comparison."""

from jaxslowmo.cli._compare import draw_comparison
from jaxslowmo.cli._tune_buckets import draw_limits, make_rows
from jaxslowmo.cli.config._algorithms import ALGORITHMS


def test_a_figure_of_runs_that_all_diverged_is_empty_and_not_an_error(tmp_path):
    draw_comparison({"slowmo": []}, tmp_path / "empty.png", subtitle="")
    assert (tmp_path / "empty.png").exists()


def test_every_algorithm_has_a_line(tmp_path):
    run = [{"step": t, "validation_loss": 5.0 - t, "bytes_sent": 1000 * t} for t in range(3)]
    draw_comparison(
        {name: [run] for algorithm in ALGORITHMS for name in (algorithm, f"{algorithm}+x=1")},
        tmp_path / "all.png", subtitle="of them",
    )  # fmt: skip
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")


def test_one_round_of_one_limit_is_drawn_without_a_warning(tmp_path):
    rows = make_rows({0: ((("a",), 4),)}, {0: [0.5]})
    draw_limits(rows, 0, tmp_path / "tune.png", subtitle="one measurement")
    assert (tmp_path / "tune.png").stat().st_size > 10_000
