"""Islands over S3: a real endpoint on this machine (moto), reached over HTTP as any bucket is."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import jaxslowmo as js
from islands.silent import silent_server
from islands.test_island import train, train_two
from islands.together import batch
from jaxslowmo.islands import IslandsError
from jaxslowmo.islands._store import ObstoreClient
from support.replay import objects, replay
from support.s3_server import BUCKET, KEY, SECRET, environment, make_bucket, served

# A region of moto's own warns; the library beneath is not ours.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
_folders = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def no_proxy() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="module")
def port(no_proxy) -> int:
    """Of an endpoint that may be stopped and started again; its buckets stay."""
    with served() as url:
        make_bucket(url, BUCKET)
    return int(url.rpartition(":")[2])


@pytest.fixture
def endpoint(port, monkeypatch) -> Iterator[str]:
    with served(port=port) as url:
        for name, value in environment(url).items():
            monkeypatch.setenv(name, value)
        yield url


@pytest.fixture
def run(endpoint) -> str:
    return f"s3://{BUCKET}/run{next(_folders)}"


def digests(url: str) -> set[str]:
    """Of the anchors at which two islands end after four rounds."""
    ends = train_two(url, 1, periods=4, quorum=2)
    return {island._rounds.anchor.digest for _, _, island in ends}


def test_a_run_over_s3_is_that_over_a_folder_and_holds_no_credentials(run, tmp_path, said):
    over_s3, found = digests(run), objects(run)
    assert over_s3 == digests(str(tmp_path)) == {replay(found)["digests"][4]}
    text = b"".join([*found.values(), *map(str.encode, [*found, *said])])
    assert KEY.encode() not in text
    assert SECRET.encode() not in text
    assert len(js.islands.status(run).islands) == 2


@pytest.mark.parametrize("place", ["s3", "folder"])
def test_a_bucket_creates_once_and_reads_lists_and_removes_objects_of_any_size(
    place, run, tmp_path
):
    store = ObstoreClient(run if place == "s3" else str(tmp_path))

    def created(number: int) -> int | None:
        with contextlib.suppress(FileExistsError):
            store.create("rounds/00000000/manifest.json", bytes([number]))
            return number
        return None

    with ThreadPoolExecutor(12) as pool:
        winners = [x for x in pool.map(created, range(12)) if x is not None]
    assert len(winners) == 1
    assert store.get("rounds/00000000/manifest.json", None) == bytes(winners)
    large = np.random.default_rng(0).bytes(17 * 2**20)
    for key, data in (("a/large", large), ("a/empty", b""), ("ab/other", b"x")):
        store.put(key, data)
        assert store.get(key, len(data)) == data
    assert [(x.key, x.size) for x in store.list("a")] == [("a/empty", 0), ("a/large", len(large))]
    store.delete("a/large")
    with pytest.raises(FileNotFoundError):
        store.get("a/large", None)


# Far more than any deadline here, and far less than a request could take before.
PATIENCE = 30.0


def test_a_store_that_falls_silent_costs_an_exchange_its_deadline_and_no_progress(
    port, monkeypatch, said
):
    """An exchange of one island makes a dozen requests; who would join is told."""
    url = f"s3://{BUCKET}/run{next(_folders)}"
    with ThreadPoolExecutor(1) as pool:
        with served(port=port) as endpoint:
            for name, value in environment(endpoint).items():
                monkeypatch.setenv(name, value)
            one = slice(0, 1)
            step, state, island = train(url, "a", one, periods=0, deadline_seconds=1)
            state, _ = step(state, batch(1, one))
        with silent_server(port):
            same = pool.submit(island.exchange, state).result(PATIENCE)
            joining = pool.submit(js.islands.join, url, name="b", deadline_seconds=1)
            with pytest.raises(IslandsError, match=r"run\.json: "):
                joining.result(PATIENCE)
        assert same is state
        assert any("Training goes on" in line for line in said)
        with served(port=port):
            island.exchange(state)
            assert replay(objects(url))["islands"] == [["a"]]
