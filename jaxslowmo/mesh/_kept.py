"""Programs that are made once and kept as long as the function they run."""

import weakref
from collections.abc import Callable, Hashable
from typing import Any

_programs: weakref.WeakKeyDictionary[Any, dict[Hashable, Any]] = weakref.WeakKeyDictionary()


def kept_with(
    fn: Callable[..., Any], key: Hashable, make: Callable[[Callable[..., Any]], Any]
) -> Any:
    """`make(fn)`, made at the first call with this `fn` and `key`.

    A transform may hold arrays, so nothing here keeps it alive: what is made goes with `fn`, and
    `make` is given a stand-in that only refers to it. A `fn` that cannot be referred to so, or a
    key without a hash, is made again at each call.

    Args:
      fn: the function that the program runs.
      key: all else that it depends on; must not hold arrays.
      make: makes the program from `fn`.

    Communication: none.
    """
    try:
        programs = _programs.setdefault(fn, {})
        program = programs.get(key)
    except TypeError:
        return make(fn)
    if program is None:
        program = programs[key] = make(_stand_in(weakref.ref(fn)))
    return program


def _stand_in(reference: weakref.ref[Callable[..., Any]]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        fn = reference()
        assert fn is not None, "who asks for the program holds its function"
        return fn(*args)

    return call
