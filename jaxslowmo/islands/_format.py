"""What lies in the bucket of a run: JSON for decisions, safetensors for arrays; no pickle anywhere.

    run.json                                what all islands agree on, and where the run starts
    rounds/00000007/joins-paris-<id>        it trains towards round 7, and was not in round 6
    rounds/00000007/part-paris-<id>         how far an island has moved since the anchor of round 7
    rounds/00000007/manifest.json           the parts of which round 7 consists, decided once
    rounds/00000007/missing-paris-<id>      that part is in the manifest and was lost, decided once
    snapshots/00000010-<digest>             the anchor before round 10, and its optimizer's state
    islands/paris.json                      the island's heartbeat: its round, updates and bytes

`<id>` is of the island's process: no two processes write the same object of a round.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

import jax
import numpy as np

from .._support.checks import ArgumentError
from ..collectives.codecs import Codec
from ._store import IslandsError, RetryingStore, TooLargeError

VERSION = 1
RUN_KEY = "run.json"
MAX_JSON = 1 << 20
MAX_HEADER = 1 << 26  # bytes that may describe the arrays of an object; also those of run.json
_OWN_HEADER = 1 << 16  # those of them that name no array
_HEADER_KEY = "islands"
_JSON_KEYS = {"run_id": "run"}  # of fields that have another name in JSON
_SETTINGS = {  # fields of `RunSettings` that all islands must have alike, in messages
    "leaves": "the model",
    "sync_every": "`sync_every`",
    "codec": "`codec`",
    "optimizer": "`outer_optimizer`",
    "max_norm_ratio": "`max_norm_ratio`",
}
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


def heartbeat_key(name: str) -> str:
    """Return the key of an island's heartbeat."""
    return f"islands/{name}.json"


def parse_round(key: str) -> int | None:
    """Return the number of a round's folder or of a snapshot; None for another key."""
    match = re.fullmatch(r"(?:rounds|snapshots)/(\d{8})(?:[/-].*)?", key)
    return int(match[1]) if match else None


def parse_island(key: str, kind: str = "part") -> str | None:
    """Return the island that wrote a part, or another kind of object; None for another key."""
    match = re.fullmatch(rf"rounds/\d{{8}}/{kind}-(.+)-[0-9a-f]+", key)
    return match[1] if match and _NAME.fullmatch(match[1]) else None


# Objects of JSON, and headers.


@dataclass(frozen=True)
class _Record:
    """A JSON object with a fixed schema: the fields, of which `run_id` is "run" in JSON."""

    def dumps(self) -> str:
        values = {_JSON_KEYS.get(name, name): x for name, x in asdict(self).items()}
        return json.dumps({"version": VERSION, **values}, sort_keys=True)

    @classmethod
    def loads(cls, text: str | bytes) -> Self:
        """Return what a JSON text says; raise `FormatError` unless it has exactly this schema."""
        try:
            values = json.loads(text)
            version = values.pop("version")
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise FormatError(f"no JSON object with a version ({error})") from error
        if version != VERSION:
            raise FormatError(f"version {version!r}, and this jaxslowmo reads {VERSION}")
        keys = {x.name: _JSON_KEYS.get(x.name, x.name) for x in fields(cls)}
        if values.keys() != {*keys.values()}:
            raise FormatError(f"fields {sorted(values)} in place of {sorted(keys.values())}")
        wrong = [keys[x.name] for x in fields(cls) if not _fits(values[keys[x.name]], x.type)]
        if wrong:
            raise FormatError(f"fields of other types: {', '.join(wrong)}")
        return cls(**{name: values[key] for name, key in keys.items()})


def _fits(value: Any, kind: Any) -> bool:
    if kind in (int, float):
        return type(value) is kind and 0 <= value < math.inf  # `True` is no number here
    if kind is str:
        return isinstance(value, str)
    return isinstance(value, list) and all(isinstance(x, str) for x in value)


@dataclass(frozen=True)
class RunSettings(_Record):
    """The settings on which all islands of a run agree.

    Attributes:
      run_id: random name of the run, 16 hexadecimal digits.
      digest: digest of the first anchor, whose snapshot was written before.
      sync_every: period in updates, as text.
      codec: the codec of parts, as text.
      optimizer: digest of the outer optimizer's program, `HostOptimizer.fingerprint`.
      leaves: name, shape of each leaf of the model.
      max_norm_ratio: norm above which a part is left out, in medians of its round.
    """

    run_id: str
    digest: str
    sync_every: str
    codec: str
    optimizer: str
    leaves: list[str] = field(default_factory=list)
    max_norm_ratio: float = 10.0

    def short_id(self) -> int:
        """Return the first 32 bits of `run_id`, which an island's state keeps; never 0."""
        return int(self.run_id[:8], 16) or 1


@dataclass(frozen=True)
class PartHeader(_Record):
    """The header of a part.

    Attributes:
      run_id, round, island: to what it belongs.
      anchor: digest of the anchor from which it is measured.
      weight: its weight in the mean.
      updates: updates of the island so far.
      sha256: that of its payload.
    """

    run_id: str
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
      run_id, round: to what it belongs.
      author: the island that wrote it.
      parts: keys of parts, one of each island, in the order in which they are summed.
    """

    run_id: str
    round: int
    author: str
    parts: list[str] = field(default_factory=list)

    def islands(self) -> list[str]:
        """Return the islands whose parts it lists."""
        return [island for key in self.parts if (island := parse_island(key))]


@dataclass(frozen=True)
class SnapshotHeader(_Record):
    """The header of a snapshot: the anchor before a round."""

    run_id: str
    round: int
    digest: str


@dataclass(frozen=True)
class Heartbeat(_Record):
    """The object that an island writes when it has joined and after each exchange.

    Attributes:
      run_id, island: to what it belongs.
      process: random name of its process.
      round: the round of which it waits for the manifest, or trains towards.
      updates: its updates so far.
      sent, received: bytes of the last exchange.
    """

    run_id: str
    island: str
    process: str
    round: int
    updates: int
    sent: int
    received: int


def read_run(store: RetryingStore) -> RunSettings | None:
    """Return the settings of the run in a store; None if there is none.

    Raises:
      IslandsError: the object of this key is none that this jaxslowmo reads.
    """
    try:
        try:
            data = store.get(RUN_KEY, MAX_JSON)
        except TooLargeError:  # of a model with very many leaves
            data = store.get(RUN_KEY, MAX_HEADER)
        return None if data is None else RunSettings.loads(data)
    except (FormatError, TooLargeError) as error:
        raise IslandsError(f"{store.url}/{RUN_KEY} is unreadable: {error}") from error


def read_heartbeat(store: RetryingStore, key: str) -> Heartbeat | None:
    """Return an island's last heartbeat; None if there is none, or it is unreadable."""
    try:
        data = store.get(key, MAX_JSON)
        return None if data is None else Heartbeat.loads(data)
    except (FormatError, TooLargeError):
        return None


def check_settings(url: str, run: RunSettings, settings: RunSettings) -> None:
    """Raise `IslandsError` naming what differs from the run; "" and [] are not known yet."""
    for name, what in _SETTINGS.items():
        theirs, mine = getattr(run, name), getattr(settings, name)
        if mine and theirs != mine:
            remedy = f"join with {what} of the run, or begin another run in an empty folder"
            if name == "leaves":
                pairs = (theirs, mine), (mine, theirs)
                theirs, mine = (", ".join((sorted({*x} - {*y}) or x)[:3]) for x, y in pairs)
            elif name == "optimizer":  # digests alone tell a user nothing
                theirs = f"the program {theirs}"
                remedy = (
                    "give all islands the same optimizer with the same rates, or begin another run "
                    "in an empty folder"
                )
            raise IslandsError(
                f"{url}/{RUN_KEY}: {what} of this run is {theirs}, and this island has {mine}: "
                f"{remedy}."
            )


def leaf_descriptions(names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> list[str]:
    """Return a text for each leaf of a model."""
    return [f"{n}[{','.join(map(str, s))}]" for n, s in zip(names, shapes, strict=True)]


# Arrays.


class PartCodec:
    """How a part's displacement is encoded: the array of uint8 or float32 that a part holds.

    Args:
      codec: a codec of `js.codecs`; None sends float32.
      size: number of elements of the model.

    Attributes:
      shapes: name, shape and dtype of that array.
      error_feedback: whether what the codec does not send is added to the next part.
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
        """Return the payload of a displacement, a vector of float32."""
        if self._codec is None:
            return x
        return jax.device_get(self._encode(jax.device_put(x[None]))).reshape(-1)

    def decode(self, payload: np.ndarray) -> np.ndarray:
        """Return the displacement of a payload, the same bits on every machine."""
        if self._codec is None:
            return payload
        return self._codec.decode(payload.reshape(self._packed), self._size)[0]


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
    expected = {name: (tuple(s), np.dtype(d)) for name, (s, d) in shapes.items()}
    if {name: (x.shape, x.dtype) for name, x in arrays.items()} != expected:
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
            f"{MAX_HEADER / 1e6:.1f} MB, and these {len(shapes)} names need {header / 1e6:.1f} MB: "
            "give parameters shorter names, or stack those of repeated layers."
        )
    return header + sum(math.prod(s) * np.dtype(d).itemsize for s, d in shapes.values())


def sha256(*buffers: Any) -> str:
    """Return the SHA-256 of several arrays or bytes, one after another."""
    digest = hashlib.sha256()
    for buffer in buffers:
        digest.update(np.ascontiguousarray(buffer).data if hasattr(buffer, "dtype") else buffer)
    return digest.hexdigest()
