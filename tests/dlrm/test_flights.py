"""The flights of the DLRM example: split by time, and no input knows how a flight ended."""

import csv
import zipfile

import numpy as np
import pytest

# ruff: noqa: SIM905, a list of words reads better so

FLIGHTS = """year month day dep_time sched_dep_time dep_delay arr_time sched_arr_time arr_delay
    carrier flight tailnum origin dest air_time distance hour minute time_hour""".split()
WEATHER = """origin year month day hour temp dewp humid wind_dir wind_speed wind_gust precip
    pressure visib time_hour""".split()
PLANES = ["tailnum", "year", "type", "manufacturer", "model", "engines", "seats", "speed", "engine"]


def flight(month, hour, tailnum, dest, arr_delay, *, day=1):
    """One row; what is known afterwards is drawn from the arrival."""
    late = "" if arr_delay is None else arr_delay
    return [
        *[2013, month, day, 500, 100 * hour, late, 700, 700, late, "UA", 7, tailnum, "JFK", dest],
        *[late, 900, hour, 0, f"2013-{month:02}-{day:02}T{hour:02}:00:00Z"],
    ]


def write(folder, rows):
    """The three tables of the package, as small as they can be."""
    with zipfile.ZipFile(folder / "flights.csv.zip", "w") as archive:
        lines = [FLIGHTS, *rows]
        archive.writestr("flights.csv", "\n".join(",".join(map(str, line)) for line in lines))
    rest = [20, 50, 0, 7, "", 0, 1000, 10]
    weather = [
        ["JFK", 2013, 1, 1, hour, 10 * hour, *rest, f"2013-01-01T0{hour}:00:00Z"]
        for hour in (5, 6, 7)
    ]
    planes = [["N1", 1999, "", "", "A320", 2, 150, "", ""]]
    for name, lines in (("weather", [WEATHER, *weather]), ("planes", [PLANES, *planes])):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(lines)


@pytest.fixture
def rows():
    """Six flights to A and one to B in January, one each in October and November."""
    training = [flight(1, 6 + i, "N1", "A", 14 + i) for i in range(6)]
    return [
        *training,
        flight(1, 12, "N2", "B", None),
        flight(10, 6, "N1", "B", -3),
        flight(11, 6, "N9", "A", 90),
    ]


def test_months_are_apart_and_what_is_rare_or_new_shares_row_0(tmp_path, rows):
    import flights

    write(tmp_path, rows)
    split = flights.split(tmp_path)
    assert split.train.late.tolist() == [0, 1, 1, 1, 1, 1]  # 15 minutes are late; one cancelled
    assert split.validation.late.tolist() == [0]
    assert split.test.late.tolist() == [1]
    assert split.num_rows["dest"] == 2
    assert split.train.ids["dest"].tolist() == [1] * 6
    assert split.validation.ids["dest"].tolist() == [0]  # B: once before October
    assert split.test.ids["tailnum"].tolist() == [0]  # N9: never before November
    assert split.test.ids["dest"].tolist() == [1]
    assert split.train.ids["earlier"][0].tolist() == [-1] * 6
    assert split.train.ids["earlier"][3].tolist() == [1, 1, 1, -1, -1, -1]  # newest first
    # The weather is that of the hour before.
    temperature = split.train.dense[:, flights.DENSE.index("temp")]
    np.testing.assert_array_equal(temperature, [50, 60, 70, np.nan, np.nan, np.nan])
    assert split.train.dense[0, flights.DENSE.index("wind_gust")] == 7  # without gusts: the wind


def test_no_input_knows_how_the_flight_ended(tmp_path, rows):
    """Other delays and times, equal inputs; and a cancelled flight stays in the schedule."""
    import flights

    write(tmp_path, rows)
    before = flights.split(tmp_path)
    known_after = [FLIGHTS.index(x) for x in ("dep_time", "dep_delay", "arr_time", "air_time")]
    for row in rows:
        for column in known_after:
            row[column] = 1
        if row[FLIGHTS.index("arr_delay")] != "":
            row[FLIGHTS.index("arr_delay")] = 60
    write(tmp_path, rows)
    after = flights.split(tmp_path)
    for one, other in zip(before[:3], after[:3], strict=True):
        np.testing.assert_array_equal(one.dense, other.dense)
        for name in one.ids:
            np.testing.assert_array_equal(one.ids[name], other.ids[name])
        assert other.late.all()
    assert before.num_rows == after.num_rows
