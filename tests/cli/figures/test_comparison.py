"""The picture of a comparison."""

from jaxslowmo.cli.config._algorithms import ALGORITHMS
from jaxslowmo.cli.figures._comparison import draw_comparison


def test_a_figure_of_runs_that_all_diverged_is_empty_and_not_an_error(tmp_path):
    draw_comparison({"slowmo": []}, tmp_path / "empty.png", title="", subtitle="")
    assert (tmp_path / "empty.png").exists()


def test_every_algorithm_has_a_line(tmp_path):
    run = [{"step": t, "validation_loss": 5.0 - t, "bytes_sent": 1000 * t} for t in range(3)]
    draw_comparison(
        {name: [run] for algorithm in ALGORITHMS for name in (algorithm, f"{algorithm}+x=1")},
        tmp_path / "all.png", title="All", subtitle="of them",
    )  # fmt: skip
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
