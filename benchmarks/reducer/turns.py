"""What a worker does for its driver: prepare a variant, then steps of it when its turn comes.

One line of JSON each way. Only the standard library: both workers import it.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

Variant = Callable[[], Callable[[], Any]]  # makes the step; a step is done when it returns


class Timed:
    """Seconds of the timed part of a step; what a step does outside `with` is not counted."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds.append(time.perf_counter() - self.start)


def serve(prepare: Callable[[str], tuple[Callable[[Timed], Any], dict]], facts: dict) -> None:
    """Answer the driver until it closes the pipe.

    `prepare(name)` returns the step of a variant and facts about it, or raises `ValueError` for
    what a library refuses; a refusal is an answer too.
    """
    say(facts)
    steps: dict[str, Callable[[Timed], Any]] = {}
    for line in sys.stdin:
        ask = json.loads(line)
        name = ask["variant"]
        if name not in steps:
            try:
                steps[name], found = prepare(name)
            except (ValueError, NotImplementedError) as error:
                say({"refused": f"{type(error).__name__}: {error}"})
                continue
            say(found)
            continue
        timed = Timed()
        for _ in range(ask["steps"]):
            steps[name](timed)
        say({"seconds": timed.seconds})


def say(answer: dict) -> None:
    print("ANSWER " + json.dumps(answer), flush=True)
