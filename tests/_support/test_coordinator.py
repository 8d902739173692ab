"""Notes between two real processes: left once, read, waited for with a limit, forgotten."""

from support.pairs import two_processes

PROGRAM = """
import time
from jaxslowmo._support import coordinator as notes

if rank == 0:
    assert notes.read_note("a/b") is None
    assert notes.write_note("a/b", "first") is True
assert notes.wait_for_note("a/b", 300) == "first" == notes.read_note("a/b")
assert notes.write_note("a/b", "second") is False
assert notes.read_note("a/b") == "first"

begun = time.monotonic()
try:
    notes.wait_for_note("never", 1.5)
except notes.NoNoteError as error:
    print("no note never within 1.5 s" == str(error), 1.4 < time.monotonic() - begun < 100)

notes.write_note(f"a/c/{rank}", "x" * 100_000)
assert len(notes.wait_for_note(f"a/c/{1 - rank}", 300)) == 100_000
notes.write_note(f"done/{rank}", "")
notes.wait_for_note(f"done/{1 - rank}", 300)
notes.delete_notes("a")
print(notes.read_note("a/b"), notes.read_note("a/c/0"))
"""


def test_notes(tmp_path):
    assert two_processes(PROGRAM, tmp_path) == ["True True\nNone None\n"] * 2
