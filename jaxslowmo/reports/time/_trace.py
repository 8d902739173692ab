"""The operations that devices ran, read from a trace of the jax profiler."""

import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData, ProfileOptions

from ..._support.private_jax import has_libtpu_without_tpu

_DEVICE = re.compile(r"/device:\w+:\d+$")  # not its helpers, such as "/device:TPU:0 SparseCore 1"
# One line of each on TPU. On GPU a line is a stream, besides lines that sum up others.
_OP_LINES = {"XLA Ops", "Async XLA Ops"}
_SUMMARIES = {"XLA Modules", "Steps", "Framework Ops", "Framework Name Scope", "Source code"}
_INSTRUCTION = re.compile(r"%?([\w.\-]+) = ")  # TPU names an event by the whole instruction


class DeviceOp(NamedTuple):
    """One operation that a device ran."""

    device: str
    start: int  # nanoseconds
    end: int
    name: str  # of the HLO instruction, or of what ran without one
    is_ours: bool = True  # known to belong to the step's program, whether or not it has that name


class TraceError(RuntimeError):
    """The error that a trace cannot start now; its text says why."""


def profile_call(call: Callable[[], Any], module: str) -> tuple[Any, list[DeviceOp], float]:
    """Call a step under the profiler and wait for it.

    Args:
      call: a function that runs the step and returns its results.
      module: name of the step's compiled module.

    Returns:
      The results, the operations that this process's devices ran for it, and its seconds.

    Raises:
      TraceError: another trace is running, or libtpu is loaded without a TPU; nothing was called.
    """
    if has_libtpu_without_tpu():  # a trace would be a segmentation fault
        raise TraceError("the jax profiler would crash: libtpu is loaded, and there is no TPU")
    options = ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1  # holds the operations of CPU devices
    options.enable_hlo_proto = False  # the program is known
    with tempfile.TemporaryDirectory(prefix="jaxslowmo-", ignore_cleanup_errors=True) as folder:
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        except RuntimeError as error:
            raise TraceError("another trace of the jax profiler is running") from error
        try:
            began = time.perf_counter()
            results = jax.block_until_ready(call())
            seconds = time.perf_counter() - began
        finally:
            jax.profiler.stop_trace()
        with warnings.catch_warnings():
            # Under Python 3.12 jaxlib's own types give one; as an error it would end the process.
            warnings.simplefilter("ignore", DeprecationWarning)
            traces = [ProfileData.from_file(str(p)) for p in Path(folder).rglob("*.xplane.pb")]
            return results, [op for trace in traces for op in device_ops(trace, module)], seconds


def device_ops(data: Any, module: str) -> Iterator[DeviceOp]:
    """Yield the operations in a trace that belong to a module, or to no module that it names.

    Args:
      data: a `jax.profiler.ProfileData`.
      module: name of the module.
    """
    for plane in data.planes:
        # CPU devices have no planes; their operations name the device.
        is_host = plane.name == "/host:CPU"
        if not is_host and not _DEVICE.match(plane.name):
            continue
        lines = [line for line in plane.lines if line.name not in _SUMMARIES]
        chosen = [line for line in lines if line.name in _OP_LINES] or lines
        events = [(event, dict(event.stats)) for line in chosen for event in line.events]
        # On CPU an operation that goes on in other threads ends later than the call that began it.
        ends = {stats.get("_c"): e.start_ns for e, stats in events if e.name.startswith("end: ")}
        for event, stats in events:
            names_module = "hlo_module" in stats
            if stats.get("hlo_module", module) != module or (is_host and "hlo_op" not in stats):
                continue
            match = _INSTRUCTION.match(event.name)
            name = str(stats.get("hlo_op") or (match[1] if match else event.name))
            device = f"cpu:{stats.get('device_ordinal', 0)}" if is_host else plane.name
            end = max(event.end_ns, ends.get(stats.get("_p"), 0))
            yield DeviceOp(device, int(event.start_ns), int(end), name, names_module)
