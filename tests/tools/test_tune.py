"""Programs of benchmarks/ that measure on a user's devices, or make a picture of a page."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
try:
    import graphs_page
    import schedule_picture
finally:
    sys.path.remove(str(ROOT / "benchmarks"))

import jaxslowmo as js  # noqa: E402
from cli.commands import write_text  # noqa: E402
from support.quick import QUICK_COMPILER  # noqa: E402


def test_the_page_of_graphs_shows_what_its_program_makes(tmp_path):
    page, nodes = graphs_page.PAGE.read_text("utf-8"), (4, 8, 16)
    shown = page.partition(f"{graphs_page.BEGIN}\n\n")[2].partition(f"\n{graphs_page.END}")[0]
    rows = [line.split("|")[1:5] for line in shown.splitlines() if line.startswith("|")]
    made = [line for line in graphs_page.tables(nodes).splitlines() if line.startswith("|")]
    assert rows == [line.split("|")[1:5] for line in made]
    graphs_page.draw(tmp_path / "graphs.png", sizes=(4,))
    assert (tmp_path / "graphs.png").stat().st_size > 20_000


def test_the_numbers_of_the_pages_text(capsys):
    for page in ("choosing.md", "model-parallel.md"):
        text = (ROOT / "docs" / page).read_text("utf-8")
        no_fence = "((?:(?!```).)*)"
        pair = f"```python\n{no_fence}```{no_fence}```text\n{no_fence}```"
        for code, _, output in re.findall(pair, text, re.DOTALL):
            exec(compile(code, page, "exec"), {"js": js})
            said = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
            assert said == output.splitlines()


def test_a_picture_of_a_schedule(tmp_path):
    schedule_picture.draw(js.schedules.by_name("zbv", 3, 6), tmp_path / "schedule.png")
    assert (tmp_path / "schedule.png").stat().st_size > 10_000


def test_settings_train_side_by_side(tmp_path):
    words = "--preset tiny --replicas 2 --steps 4 --periods 2 --momenta 0.5 --seeds 0,1"
    program = ROOT / "benchmarks" / "tune_outer.py"
    command = [sys.executable, program, *words.split(), "--algorithm", "diloco"]
    done = subprocess.run(
        [*command, "--data", write_text(tmp_path / "text"), "--out", tmp_path / "outer.png"],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_COMPILER},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"^every 2: factor 1, rate 1, momentum 0.5: [2-9]\.", done.stdout, re.MULTILINE
    )
    assert "Every 2: " in done.stdout
    assert (tmp_path / "outer.png").exists()
