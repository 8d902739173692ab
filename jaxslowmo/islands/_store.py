"""The object store between islands: one bucket or folder, with patience and with counts."""

import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from .._support.checks import ArgumentError
from .._support.extras import needed_by

_CHUNK = 8 << 20  # bytes that one request reads, so that each is short on a slow link
_REQUEST_SECONDS = 1.0, 120.0  # the least and the most that a small request may take
_MIB_SECONDS = 8  # what it may take longer for each MiB beyond the first
_OPTIONS_FROM_ENVIRONMENT = ("allow_http", "allow_invalid_certificates", "proxy_url")
_SCHEMES = ("s3", "gs", "az", "azure", "abfs", "file")
_SECRET = re.compile(r"(?i)(signature|credential|token|secret|key|sig)=[^&\s\"']+")
_Result = TypeVar("_Result")


class IslandsError(RuntimeError):
    """The error of an island that can't take part: another run's bucket, another model, no access.

    The message is one line that names what and where.
    """


class StoreError(IslandsError):
    """The error that the store did not answer in time, or refused; nothing is lost by it."""


class TooLargeError(Exception):
    """The error that an object is larger than anything that belongs there."""


class Entry(NamedTuple):
    """An object in a listing."""

    key: str  # path below the run's URL
    size: int  # bytes
    modified: datetime  # by the store's clock


class ObjectStore(Protocol):
    """The requests of an island to a store; each call is one of them, or a few for large objects.

    Methods raise `FileNotFoundError` where there is no such object or bucket, and `FileExistsError`
    where `create` finds one. All other exceptions count as a failure that may pass.

    Attributes:
      refusals: exceptions that do not pass by waiting.
      timeout_seconds: how long a request may take.
    """

    refusals: tuple[type[Exception], ...]
    timeout_seconds: float

    def get(self, key: str, limit: int | None) -> bytes: ...
    def create(self, key: str, data: bytes) -> None: ...
    def put(self, key: str, data: bytes) -> None: ...
    def delete(self, key: str) -> None: ...
    def list(self, prefix: str) -> list[Entry]: ...


def parse_url(url: str) -> tuple[str, str]:
    """Return the scheme of a URL, or "file" for a folder, and its path; raise `ValueError`."""
    scheme, is_url, path = url.partition(":") if isinstance(url, str) else ("", "", "")
    path = path.removeprefix("//")
    if scheme and not is_url:
        scheme, path = "file", str(Path(url).expanduser().absolute())
    if scheme not in _SCHEMES or not path or (is_url and "://" not in url):
        raise ArgumentError(
            "url",
            f"islands: `url` must be a folder or begin with {', '.join(_SCHEMES[:3])} or file, "
            f"as in s3://bucket/run, got {url!r}.",
        )
    return scheme, path


class ObstoreClient:
    """An object store that the library obstore reaches: S3, GCS, Azure or a folder.

    Args:
      url: `s3://bucket/run`, `gs://...`, `az://...`, `file:///folder`, or the path of a folder.
        Credentials come from the environment, as obstore reads them.
      creates: whether to make a folder that is not there.

    Raises:
      ValueError: no such URL.
      IslandsError: no such folder or bucket, or no access.
      ModuleNotFoundError: obstore or safetensors is missing; the extra `islands` has them.
    """

    def __init__(self, url: str, *, creates: bool = True) -> None:
        scheme, path = parse_url(url)
        # Here, so that `from jaxslowmo import *` needs no extra.
        with needed_by("jaxslowmo.islands"):
            import obstore
            import safetensors.numpy  # noqa: F401  (of what lies in the bucket)
            from obstore import exceptions as errors
            from obstore import store as stores
        self._obstore, self._from_url = obstore, stores.from_url
        self._exists = errors.AlreadyExistsError, errors.PreconditionError
        # Waiting does not help. Stores without "create if absent" raise the last two.
        self.refusals: tuple[type[Exception], ...] = (
            errors.PermissionDeniedError, errors.UnauthenticatedError,
            errors.NotSupportedError, NotImplementedError,
        )  # fmt: skip
        self.timeout_seconds = _REQUEST_SECONDS[1]
        self._url, self._clients = url, dict[float, Any]()
        self._folder: Any = None
        # obstore 0.12 reads these from the environment only where it is given no options.
        prefix = {"s3": "AWS", "gs": "GOOGLE"}.get(scheme, "AZURE")
        names = {name: f"{prefix}_{name.upper()}" for name in _OPTIONS_FROM_ENVIRONMENT}
        self._options = {name: x for name, key in names.items() if (x := os.environ.get(key))}
        try:
            if scheme == "file":
                if not creates and not Path(path).is_dir():
                    raise IslandsError(f"{url}: there is no run here.")
                self._folder = stores.LocalStore(path, mkdir=True)
            else:
                self._client()
        except (OSError, errors.BaseError) as error:
            raise IslandsError(f"{url}: {_error_line(error)}") from error

    def _client(self, num_bytes: int = 0) -> Any:
        """Return the client for requests of up to so many bytes.

        A client of obstore has one deadline for all its requests. So there is one client for each
        power of 2 of MiB: a silent store is left soon, and a slow link is not taken for one.
        """
        if self._folder is not None:
            return self._folder
        mib = 1 << ((min(num_bytes, _CHUNK) - 1) >> 20).bit_length() if num_bytes else 1
        seconds = min(max(self.timeout_seconds, _REQUEST_SECONDS[0]), _REQUEST_SECONDS[1])
        whole = seconds + _MIB_SECONDS * (mib - 1)
        if whole not in self._clients:
            limits = {
                "timeout": timedelta(seconds=whole),
                "connect_timeout": timedelta(seconds=min(10.0, seconds)),
            }
            # `RetryingStore` asks again, and counts it.
            retries: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}
            options: Any = {**limits, **self._options}
            self._clients[whole] = self._from_url(
                self._url, client_options=options, retry_config=retries
            )
        return self._clients[whole]

    def get(self, key: str, limit: int | None) -> bytes:
        """Return an object; raise `TooLargeError`, reading little of it, if it is above `limit`."""
        # Its bytes are not read yet. A first range would fail for an object of no bytes on S3.
        client = self._client(_CHUNK if limit is None else limit)
        whole = self._obstore.get(client, key)
        size = whole.meta["size"]
        if limit is not None and size > limit:
            raise TooLargeError(f"{size} bytes, and at most {limit} belong there")
        if size <= _CHUNK:
            return bytes(whole.bytes())
        parts = []
        for start in range(0, size, _CHUNK):
            end = min(start + _CHUNK, size)
            parts.append(bytes(self._obstore.get_range(client, key, start=start, end=end)))
        return b"".join(parts)

    def create(self, key: str, data: bytes) -> None:
        """Write an object unless there is one: of several at once exactly one succeeds."""
        try:
            self._obstore.put(self._client(len(data)), key, data, mode="create")
        except self._exists as error:
            raise FileExistsError(key) from error

    def put(self, key: str, data: bytes) -> None:
        """Write an object, in several requests if it is large; readers see all of it or nothing."""
        self._obstore.put(self._client(len(data)), key, data, max_concurrency=4)

    def delete(self, key: str) -> None:
        """Remove an object."""
        self._obstore.delete(self._client(), key)

    def list(self, prefix: str) -> list[Entry]:
        """Return the objects whose keys begin with a folder's name, in the order of their keys."""
        objects = self._obstore.list(self._client(), prefix).collect()
        return sorted(Entry(x["path"], x["size"], x["last_modified"]) for x in objects)


@dataclass
class Traffic:
    """What went to a store and came from it.

    Attributes:
      requests: number of calls by kind: "get", "create", "put", "delete", "list". A large object
        takes several requests of the store's own protocol.
      sent, received: bytes of objects.
    """

    requests: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    received: int = 0


class Clock(NamedTuple):
    """This machine's own time, which is never compared with another's."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class RetryingStore:
    """An object store whose requests are repeated for a while when they fail, and are counted.

    Args:
      object_store: the store.
      url: its name in messages.
      patience: seconds for which failing requests are repeated, from one `restart_patience` to
        the next.
      clock: this machine's time.
      log: function that shows one line to the user.
    """

    def __init__(
        self,
        object_store: ObjectStore,
        url: str,
        patience: float,
        clock: Clock,
        log: Callable[[str], None],
    ) -> None:
        self._object_store, self.url = object_store, url.rstrip("/")
        self.patience, self.clock, self._log = patience, clock, log
        self.traffic = Traffic()
        self.restart_patience()

    def restart_patience(self) -> None:
        """Have all of `patience` again, for what begins now."""
        self._failed, self._object_store.timeout_seconds = 0.0, self.patience

    def get(self, key: str, limit: int | None = None) -> bytes | None:
        """Return an object; None if there is none."""
        try:
            data = self._retry(
                "get",
                key,
                lambda: self._object_store.get(key, limit),
                FileNotFoundError,
                TooLargeError,
            )
        except FileNotFoundError:
            return None
        self.traffic.received += len(data)
        return data

    def create(self, key: str, data: bytes) -> bool:
        """Write an object unless there is one; return whether there was none.

        After a failure that took effect nevertheless the answer is False.
        """
        try:
            self._retry(
                "create", key, lambda: self._object_store.create(key, data), FileExistsError
            )
        except FileExistsError:
            return False
        self.traffic.sent += len(data)
        return True

    def put(self, key: str, data: bytes) -> None:
        """Write an object in the place of an older one."""
        self._retry("put", key, lambda: self._object_store.put(key, data))
        self.traffic.sent += len(data)

    def delete(self, key: str) -> None:
        """Remove an object, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._retry("delete", key, lambda: self._object_store.delete(key), FileNotFoundError)

    def list(self, prefix: str) -> list[Entry]:
        """Return the objects below a folder."""
        return self._retry("list", prefix, lambda: self._object_store.list(prefix))

    def _retry(
        self, kind: str, key: str, request: Callable[[], _Result], *answers: type[Exception]
    ) -> _Result:
        """Return the answer of a request, which is repeated until there is one.

        Args:
          kind: what it asks for; see `Traffic`.
          key: the object or folder.
          request: function that asks once.
          answers: exceptions that are answers.

        Raises:
          StoreError: requests failed for as long as `patience`, or it was refused.
        """
        # A request that lists FileNotFoundError as an answer found no object; for all others the
        # error means that there is no such bucket, and that does not pass by waiting.
        refusals = (*self._object_store.refusals, FileNotFoundError)
        pause, is_logged = 0.1, False
        while True:
            start_time = self.clock.now()
            self.traffic.requests[kind] += 1
            try:
                result = request()
            except answers:
                raise
            except Exception as error:  # each store has its own
                what = f"{kind} {self.url}/{key}: {_error_line(error)}"
                self._failed += self.clock.now() - start_time
                if self._failed >= self.patience or isinstance(error, refusals):
                    raise StoreError(what) from error
                if not is_logged and pause > 1:
                    self._log(f"{what}; trying again for {self.patience:g} s")
                    is_logged = True
                self.clock.sleep(pause)
                self._failed += pause
                pause = min(2 * pause, 5.0)
            else:
                return result


def _error_line(error: Exception) -> str:
    """Return the kind of an error and its first line, without what a signed URL gives away."""
    text = str(error).strip().splitlines()
    first = _SECRET.sub(r"\1=...", text[0]) if text else ""
    return f"{type(error).__name__}: {first[:300]}"
