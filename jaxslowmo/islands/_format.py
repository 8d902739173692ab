"""What lies in the bucket of a run: JSON for decisions, safetensors for arrays; no pickle anywhere.

    run.json                                what all islands agree on, and where the run starts
    rounds/00000007/joins-paris-<id>        it trains towards round 7, and was not in round 6
    rounds/00000007/part-paris-<id>         how far an island has moved since the anchor of round 7
    rounds/00000007/manifest.json           the parts of which round 7 consists, decided once
    rounds/00000007/missing-paris-<id>      that part is in the manifest and was lost, decided once
    snapshots/00000010-<digest>             the anchor before round 10, and its optimizer's state
    islands/paris.json                      what an island last did; nothing depends on it

`<id>` is of the island's process: no two processes write the same object of a round.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from .._support.checks import ArgumentError
from ..collectives.codecs import Codec
from ._store import Clock, IslandsError, ObjectStore, Store, TooLargeError

VERSION = 1
RUN = "run.json"
MAX_JSON = 1 << 20
MAX_HEADER = 1 << 26  # bytes that may describe the arrays of an object, and of run.json
_OWN_HEADER = 1 << 16  # those of them that name no array
_HEADER_KEY = "islands"
Shapes = Mapping[str, tuple[tuple[int, ...], Any]]  # shape and dtype of each array by name
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class FormatError(ValueError):
    """The error of an object that is not what its key says."""


# Keys.


def checked_name(name: Any) -> str:
    """Return the name of an island; raise `ValueError` unless it may be part of a key."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ArgumentError(
            "name",
            "islands.join: `name` must be up to 64 letters, digits, `_`, `.` and `-`, the first a "
            f"letter or digit, got {name!r}.",
        )
    return name


def round_folder(number: int) -> str:
    """Return the folder of a round."""
    return f"rounds/{number:08d}"


def manifest_key(number: int) -> str:
    """Return the key of a round's manifest."""
    return f"{round_folder(number)}/manifest.json"


def part_key(number: int, island: str, process: str, kind: str = "part") -> str:
    """Return the key of a part, or of another kind of object of an island in a round."""
    return f"{round_folder(number)}/{kind}-{island}-{process}"


def missing_key(part: str) -> str:
    """Return the key of the object by which all islands leave out a part that was lost."""
    return part.replace("/part-", "/missing-")


def snapshot_key(number: int, digest: str) -> str:
    """Return the key of a snapshot of the anchor before a round."""
    return f"snapshots/{number:08d}-{digest[:16]}"


def note_key(name: str) -> str:
    """Return the key of an island's note."""
    return f"islands/{name}.json"


def parse_round(key: str) -> int | None:
    """Return the number of a round's folder or of a snapshot; None for another key."""
    found = re.fullmatch(r"(?:rounds|snapshots)/(\d{8})(?:[/-].*)?", key)
    return int(found[1]) if found else None


def parse_island(key: str, kind: str = "part") -> str | None:
    """Return the island that wrote a part, or another kind of object; None for another key."""
    found = re.fullmatch(rf"rounds/\d{{8}}/{kind}-(.+)-[0-9a-f]+", key)
    return found[1] if found and _NAME.fullmatch(found[1]) else None


# Objects of JSON, and headers.


@dataclass(frozen=True)
class _Record:
    """A JSON object with a fixed schema."""

    def dumps(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, sort_keys=True)

    @classmethod
    def loads(cls, text: str | bytes) -> Self:
        """Return what a JSON text says; raise `FormatError` unless it has exactly this schema."""
        try:
            found = json.loads(text)
            version = found.pop("version")
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise FormatError(f"no JSON object with a version ({error})") from error
        if version != VERSION:
            raise FormatError(f"version {version!r}, and this jaxslowmo reads {VERSION}")
        kinds = {x.name: x.type for x in fields(cls)}
        if found.keys() != kinds.keys():
            raise FormatError(f"fields {sorted(found)} in place of {sorted(kinds)}")
        wrong = [name for name, x in found.items() if not _fits(x, kinds[name])]
        if wrong:
            raise FormatError(f"fields of other types: {', '.join(wrong)}")
        return cls(**found)


def _fits(value: Any, kind: Any) -> bool:
    if kind in (int, float):
        return type(value) is kind and 0 <= value < math.inf  # `True` is no number here
    if kind is str:
        return isinstance(value, str)
    return isinstance(value, list) and all(isinstance(x, str) for x in value)


@dataclass(frozen=True)
class Run(_Record):
    """The settings on which all islands of a run agree.

    Attributes:
      run: random name of the run.
      digest: digest of the first anchor, whose snapshot was written before.
      sync_every: period in updates, as text.
      codec: the codec of parts, as text.
      optimizer: what the outer optimizer's program computes, as `HostOptimizer.text`.
      leaves: name, shape of each leaf of the model.
      max_norm_ratio: norm above which a part is left out, in medians of its round.
    """

    run: str
    digest: str
    sync_every: str
    codec: str
    optimizer: str
    leaves: list[str] = field(default_factory=list)
    max_norm_ratio: float = 10.0

    def short_id(self) -> int:
        """Return 32 bits of the name, by which states know their run; never 0."""
        return int(self.run[:8], 16) or 1


@dataclass(frozen=True)
class Part(_Record):
    """The header of a part.

    Attributes:
      run, round, island: to what it belongs.
      anchor: digest of the anchor from which it is measured.
      weight: its weight in the mean.
      updates: updates of the island so far.
      sha256: that of its payload.
    """

    run: str
    round: int
    island: str
    anchor: str
    weight: float
    updates: int
    sha256: str


@dataclass(frozen=True)
class Manifest(_Record):
    """The parts of which a round consists.

    Attributes:
      run, round: to what it belongs.
      author: the island that wrote it.
      parts: keys of parts, one of each island, in the order in which they are summed.
    """

    run: str
    round: int
    author: str
    parts: list[str] = field(default_factory=list)

    def islands(self) -> list[str]:
        """Return the islands whose parts it lists."""
        return [island for key in self.parts if (island := parse_island(key))]


@dataclass(frozen=True)
class Snapshot(_Record):
    """The header of a snapshot: the anchor before a round."""

    run: str
    round: int
    digest: str


@dataclass(frozen=True)
class Note(_Record):
    """The note that an island leaves after each exchange.

    Attributes:
      run, island: to what it belongs.
      process: random name of its process.
      round: the round of which it waits for the manifest, or trains towards.
      updates: its updates so far.
      sent, received: bytes of the last exchange.
    """

    run: str
    island: str
    process: str
    round: int
    updates: int
    sent: int
    received: int


def read_run(store: Store) -> Run | None:
    """Return the run in a store; None if there is none.

    Raises:
      IslandsError: something else.
    """
    try:
        try:
            data = store.get(RUN, MAX_JSON)
        except TooLargeError:  # of a model with very many leaves
            data = store.get(RUN, MAX_HEADER)
        return None if data is None else Run.loads(data)
    except (FormatError, TooLargeError) as error:
        raise IslandsError(f"{store.url}/{RUN} is unreadable: {error}") from error


def read_note(store: Store, key: str) -> Note | None:
    """Return what an island last did; None if nothing readable says so."""
    try:
        data = store.get(key, MAX_JSON)
        return None if data is None else Note.loads(data)
    except (FormatError, TooLargeError):
        return None


_SETTINGS = {
    "leaves": "the model",
    "sync_every": "`sync_every`",
    "codec": "`codec`",
    "optimizer": "`outer_optimizer` (its program)",
    "max_norm_ratio": "`max_norm_ratio`",
}


def check_settings(url: str, run: Run, settings: Run) -> None:
    """Raise `IslandsError` naming what differs from the run; "" and [] are not known yet."""
    for name, what in _SETTINGS.items():
        theirs, mine = getattr(run, name), getattr(settings, name)
        if mine and theirs != mine:
            if name == "leaves":
                pairs = (theirs, mine), (mine, theirs)
                theirs, mine = (", ".join((sorted({*x} - {*y}) or x)[:3]) for x, y in pairs)
            raise IslandsError(
                f"{url}/{RUN}: {what} of this run is {theirs}, and this island has {mine}."
            )


def leaf_descriptions(names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> list[str]:
    """Return a text for each leaf of a model."""
    return [f"{n}[{','.join(map(str, s))}]" for n, s in zip(names, shapes, strict=True)]


# Arrays.


class Wire:
    """The payload of a part.

    Args:
      codec: a codec of `js.codecs`; None sends float32.
      size: number of elements of the model.

    Attributes:
      shapes: name, shape and dtype of its array.
    """

    def __init__(self, codec: Codec | None, size: int) -> None:
        self._codec: Any = codec
        self._size = size
        self.error_feedback = codec is not None and codec.error_feedback
        self.shapes: Shapes = {"displacement": ((size,), np.float32)}
        if codec is not None:
            row = jax.ShapeDtypeStruct((1, size), np.float32)
            self._packed = jax.eval_shape(codec.encode, row).shape
            self._encode = jax.jit(codec.encode)
            self.shapes = {"codes": ((math.prod(self._packed),), np.uint8)}

    def encode(self, x: np.ndarray) -> np.ndarray:
        """Return a vector of float32 as it is sent."""
        if self._codec is None:
            return x
        return jax.device_get(self._encode(jax.device_put(x[None]))).reshape(-1)

    def decode(self, sent: np.ndarray) -> np.ndarray:
        """Return the vector that was sent, the same bits on every machine."""
        if self._codec is None:
            return sent
        return self._codec.decode(sent.reshape(self._packed), self._size)[0]


def concatenate(leaves: Sequence[np.ndarray]) -> np.ndarray:
    """Return the leaves of a model as one vector."""
    return np.concatenate([np.ravel(x) for x in leaves]) if leaves else np.zeros(0, np.float32)


def split_like(x: np.ndarray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return a vector as leaves; the inverse of `concatenate`."""
    ends = np.cumsum([leaf.size for leaf in like])
    parts = np.split(x, ends[:-1]) if like else []
    return [part.reshape(leaf.shape) for part, leaf in zip(parts, like, strict=True)]


def dump(header: _Record, arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return arrays and their header as safetensors."""
    from safetensors import numpy as safetensors

    return safetensors.save(dict(arrays), {_HEADER_KEY: header.dumps()})


def parse_header(data: bytes, kind: type[Any]) -> Any:
    """Return the header of safetensors; raise `FormatError` for anything else."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(MAX_HEADER, len(data) - 8):
        raise FormatError("no safetensors")
    try:
        text = json.loads(data[8 : 8 + size])["__metadata__"][_HEADER_KEY]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError("safetensors without a header of islands") from error
    return kind.loads(text)


def parse_arrays(data: bytes, shapes: Shapes) -> list[np.ndarray]:
    """Return the arrays of safetensors in this order; raise `FormatError` unless they are these."""
    from safetensors import numpy as safetensors

    try:
        arrays = safetensors.load(data)
    except Exception as error:  # the library has errors of its own
        raise FormatError(f"no safetensors ({type(error).__name__})") from error
    found = {name: (x.shape, x.dtype) for name, x in arrays.items()}
    if found != {name: (tuple(s), np.dtype(d)) for name, (s, d) in shapes.items()}:
        raise FormatError("arrays of other names, shapes or dtypes")
    return [arrays[name] for name in shapes]


def max_num_bytes(shapes: Shapes) -> int:
    """Return the largest size in bytes of an object that holds these arrays.

    Raises:
      ValueError: their names need a header that is larger than any that is read.
    """
    header = _OWN_HEADER + sum(
        len(json.dumps(name)) + 100 + 21 * len(shape) for name, (shape, _) in shapes.items()
    )
    if header > MAX_HEADER:
        raise ValueError(
            f"islands: names and shapes of parameters in `state` must fit headers of at most "
            f"{MAX_HEADER / 1e6:.1f} MB, and these {len(shapes)} names need {header / 1e6:.1f} MB."
        )
    return header + sum(math.prod(s) * np.dtype(d).itemsize for s, d in shapes.values())


def sha256(*buffers: Any) -> str:
    """Return the SHA-256 of several arrays or bytes, one after another."""
    digest = hashlib.sha256()
    for buffer in buffers:
        digest.update(np.ascontiguousarray(buffer).data if hasattr(buffer, "dtype") else buffer)
    return digest.hexdigest()


# Who takes part, by what lies in the bucket.


class IslandStatus(NamedTuple):
    """What an island last did.

    Attributes:
      name: its name.
      round: the round towards which it trains, or of which it waits for the manifest.
      lag: rounds between that and the open round.
      has_part: whether the open round has a part of it.
      updates: its updates so far.
      sent, received: bytes of its last exchange.
      last_seen: when it last wrote, by the store's clock.
    """

    name: str
    round: int
    lag: int
    has_part: bool
    updates: int
    sent: int
    received: int
    last_seen: datetime


class Status(NamedTuple):
    """Where a run is.

    Attributes:
      run: its name.
      round: the open round: as many are decided.
      snapshot: round of the newest snapshot.
      bytes: size of all objects in the store.
      islands: the islands that have ever joined.
    """

    run: str
    round: int
    snapshot: int
    bytes: int
    islands: list[IslandStatus]

    def __str__(self) -> str:
        """Return a table."""
        head = (
            f"run {self.run}: round {self.round} is open, newest snapshot {self.snapshot}, "
            f"{self.bytes:,} bytes in the store"
        )
        rows = [("island", "round", "lag", "part", "updates", "sent", "received", "last seen")]
        rows += [
            (
                x.name, str(x.round), str(x.lag), "yes" if x.has_part else "-", str(x.updates),
                f"{x.sent:,}", f"{x.received:,}", f"{x.last_seen:%Y-%m-%d %H:%M:%S} UTC",
            )
            for x in self.islands
        ]  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([head, *lines])


def status(url: str) -> Status:
    """Return who takes part in the run at a URL: islands, rounds, lags, bytes and when they wrote.

    Args:
      url: the URL or the folder of the run, as in `js.islands.join`.

    Returns:
      A `Status`, which prints as a table.

    Raises:
      IslandsError: there is no run, or the store does not answer.

    Communication: one listing of the store, and one small object per island.
    """
    store = Store(ObjectStore(url, creates=False), url, 10.0, Clock(), lambda line: None)
    run = read_run(store)
    if run is None:
        raise IslandsError(f"{store.url}: there is no run here.")
    entries = store.list("")
    keys = [entry.key for entry in entries]
    decided = [parse_round(key) for key in keys if key.endswith("/manifest.json")]
    number = max((n + 1 for n in decided if n is not None), default=0)
    snapshots = [parse_round(key) or 0 for key in keys if key.startswith("snapshots/")]
    present = {parse_island(key) for key in keys if key.startswith(f"{round_folder(number)}/")}
    islands = []
    for entry in entries:
        note = read_note(store, entry.key) if entry.key.startswith("islands/") else None
        if note is not None:
            islands.append(
                IslandStatus(
                    note.island, note.round, number - note.round, note.island in present,
                    note.updates, note.sent, note.received, entry.modified,
                )
            )  # fmt: skip
    size = sum(entry.size for entry in entries)
    return Status(run.run, number, max(snapshots, default=0), size, islands)
