"""Three islands on hosts, with the store on a fourth: killed, restarted, and nothing is lost."""

from island_runs import BUCKET, Moment, problems, replayed, run_islands, store
from small_runs import quick

PLANS = {
    "b": [(Moment("while a part is sent", "part begins", 0.005), 1.0)],
    "c": [
        (Moment("after a part was sent", "part ends"), 1.0),
        (Moment("between exchanges", "trains", 1.0), 1.0),
    ],
}
OPTIONS = ("--step-seconds", "0.02", "--sync-every", "60", "--deadline", "3", "--delay", "20")


def test_killed_islands_end_at_the_same_anchor_which_follows_from_the_bucket(
    four_hosts, tmp_path, programs
):
    with store(four_hosts[3]) as reach:
        env = quick(programs) | reach
        ran = run_islands(
            tmp_path, "abc", BUCKET, PLANS,
            env=env, hosts=four_hosts[:3], options=OPTIONS,
            patience=20, seconds=120,
        )  # fmt: skip
        ran.replay = replayed(BUCKET, env, four_hosts[3])
    assert len(ran.kills) == 3
    assert problems(ran) == []
    # After its restart each counts again.
    assert {name for names in ran.replay["islands"][-3:] for name in names} == {*"abc"}
    assert len(ran.replay["snapshots"]) <= 2 + ran.replay["rounds"] // 2
