"""What a worker does for its driver: prepare a variant, then a turn of it whenever it is asked.

Only the standard library: workers of both libraries import it.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")


@dataclass(frozen=True)
class Variant:
    """What a worker can do.

    Attributes:
      steps: `steps(count)` does so many and returns the last loss when all is done.
      evaluate: facts about what was trained so far, after a turn and outside of its time.
    """

    steps: Callable[[int], float]
    evaluate: Callable[[], dict] = dict


def say(answer: dict) -> None:
    print("ANSWER " + json.dumps(answer), flush=True)


def serve(
    prepare: Callable[[str], tuple[Variant, dict]],
    meet: Callable[[], None],
    facts: dict,
) -> None:
    """Answer the driver until it closes the pipe.

    `prepare(name)` returns a variant and facts about it; it raises `ValueError` for what a library
    refuses. `meet()` returns when all workers have called it.
    """
    say(facts)
    variants = {}
    for line in sys.stdin:
        ask = json.loads(line)
        name = ask["variant"]
        if name in variants:
            say(turn(variants[name], ask["steps"], meet))
            continue
        try:
            variants[name], found = prepare(name)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            found = {"refused": f"{type(error).__name__}: {error}"}
        say(found)


def turn(variant: Variant, count: int, meet: Callable[[], None]) -> dict[str, float]:
    """Seconds, those of the processor, and bytes of `count` steps."""
    meet()
    sent, start = int(COUNTER.read_text()), time.perf_counter()
    processor = time.process_time()
    loss = variant.steps(count)
    seconds = time.perf_counter() - start
    processor = time.process_time() - processor
    meet()
    sent = int(COUNTER.read_text()) - sent
    meet()  # nobody sends what is not counted before the slowest has read its counter
    return {
        "seconds": seconds,
        "processor": processor,
        "bytes": sent,
        "loss": loss,
        **variant.evaluate(),
    }
