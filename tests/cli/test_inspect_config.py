"""`jaxslowmo inspect config`: where a run would lie, and what it would send."""

import pytest

import jaxslowmo as js


def row(out, begin):
    return next(line for line in out.splitlines() if line.startswith(begin))


def test_a_run_of_stages(call):
    mesh = ("--mesh", "replica=2,stage=2", "--batch", 4, "--schedule", "gpipe")
    outcome = call("inspect", "config", "--preset", "tiny", "--algorithm", "local_sgd", *mesh)
    assert (outcome.code, outcome.err) == (0, "")
    facts = dict(row for row in outcome.rows if len(row) == 2)
    assert facts["devices"] == "2 replicas of 2 devices (stage=2) on 4 of 8 CPU devices"
    assert facts["layers of each stage"] == "0 to 0; 1 to 2"
    assert (facts["executor"], facts["bubble, equal costs"]) == ("one_program", "20.0%")
    assert facts["microbatches that a stage holds"] == "4, 4"
    assert row(outcome.out, "average  replica").split()[2:4] == ["all-reduce", "1"]
    assert not any(line.startswith("local    replica") for line in outcome.out.splitlines())


def test_a_run_whose_stages_the_host_dispatches(call):
    mesh = ("--mesh", "replica=2,stage=2", "--batch", 4, "--executor", "host")
    outcome = call("inspect", "config", "--preset", "tiny", "--algorithm", "all_reduce", *mesh)
    assert (outcome.code, outcome.err) == (0, "")
    facts = dict(row for row in outcome.rows if len(row) == 2)
    free = js.schedules.one_f_one_b(2, 4).simulate()  # no stage waits for the end of a tick
    assert (facts["executor"], facts["bubble, equal costs"]) == ("host", f"{free.bubble:.1%}")


@pytest.mark.exhaustive
def test_virtual_replicas(call):
    outcome = call("inspect", "config", "--preset", "tiny", "--replicas", 16)
    assert (outcome.code, outcome.err) == (0, "")
    assert dict(outcome.rows[:2])["devices"] == "16 virtual replicas on one CPU device"


def test_what_train_would_refuse(call):
    outcome = call("inspect", "config", "--preset", "tiny", "--mesh", "stage=5")
    assert outcome.code == 2
    assert "5 stages need as many layers" in outcome.err
