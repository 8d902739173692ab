"""What lines of progress say of records."""

import io

from rich.console import Console

from jaxslowmo.cli._output import Reporter


def lines(*records, steps=4):
    shown = io.StringIO()
    with Reporter(Console(file=shown, width=200), "sgd", steps) as reporter:
        for record in records:
            reporter.show({"bytes_sent": 0, **record})
    return shown.getvalue().splitlines()


def test_an_evaluation_of_some_steps_ago_is_told_with_its_step():
    first, second, third, note = lines(
        {"step": 0, "validation_loss": 5.0},
        {"step": 1, "loss": 4.0},
        {"step": 2, "loss": 3.0, "validation_loss": 2.5},
        {"step": 4, "loss": 2.0, "tokens_per_second": None},
    )
    assert first == "sgd: 0/4  validation 5.000  sent 0 B"
    assert second == "sgd: 1/4  loss 4.000  validation 5.000 (step 0)  sent 0 B"
    assert third == "sgd: 2/4  loss 3.000  validation 2.500  sent 0 B"
    assert note == "sgd: 4/4  loss 2.000  validation 2.500 (step 2)  sent 0 B"


def test_what_was_never_evaluated_is_not_told():
    assert lines({"step": 1, "loss": 4.0}) == ["sgd: 1/4  loss 4.000  sent 0 B"]
