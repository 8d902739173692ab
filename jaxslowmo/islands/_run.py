"""The small objects that say what a run is: its settings, and what each island last did."""

from ._format import MAX_HEADER, MAX_JSON, RUN, FormatError, Note, Run
from ._store import IslandsError, Store, TooLargeError


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


def note_key(name: str) -> str:
    """Return the key of an island's note."""
    return f"islands/{name}.json"


def read_note(store: Store, key: str) -> Note | None:
    """Return what an island last did; None if nothing readable says so."""
    try:
        data = store.get(key, MAX_JSON)
        return None if data is None else Note.loads(data)
    except (FormatError, TooLargeError):
        return None


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


_SETTINGS = {
    "leaves": "the model",
    "sync_every": "`sync_every`",
    "codec": "`codec`",
    "optimizer": "`outer_optimizer` (its program)",
    "max_norm_ratio": "`max_norm_ratio`",
}
