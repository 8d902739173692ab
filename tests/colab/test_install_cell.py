"""The notebooks' first code cell: where it takes the package from, or what it says."""

import importlib.metadata
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ["slowmo_on_tpu", "tpu_manager", "islands"]
WHEEL = "jaxslowmo-0.3.0-py3-none-any.whl"
ADDRESS = "https://git.example.org/group/name"


def cell(notebook: str) -> str:
    path = ROOT / "colab" / f"{notebook}.ipynb"
    return "".join(json.loads(path.read_text("utf-8"))["cells"][2]["source"])


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Runs the cell in an empty folder where jaxslowmo is not installed: what it gives to pip."""
    asked: list[list[str]] = []

    def run(call: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        asked.append(call)
        return subprocess.CompletedProcess(call, 0, stdout="cpu\n")

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(importlib.metadata, "version", version)

    def execute(**lines: str) -> str | None:
        code = cell("islands").replace('"/content', f'"{tmp_path}/content')
        for name, value in lines.items():
            code, times = re.subn(rf'^{name} = "[^"]*"', f'{name} = "{value}"', code, flags=re.M)
            assert times == 1
        asked.clear()
        exec(compile(code, "cell", "exec"), {"__name__": "__main__"})
        marks = (str(tmp_path), "://", "/somewhere")
        ours = [p for call in asked for p in call if any(mark in p for mark in marks)]
        assert len(ours) <= 1
        return re.sub(r"\[[a-z,]+\]", "", ours[0]).replace(str(tmp_path), "") if ours else None

    return execute


@pytest.mark.parametrize(
    ("files", "lines", "taken"),
    [
        ([f"content/{WHEEL}"], {}, f"/content/{WHEEL}"),  # uploaded
        ([f"here/{WHEEL}"], {}, f"/here/{WHEEL}"),  # beside the notebook
        (["content/jaxslowmo/pyproject.toml"], {}, "/content/jaxslowmo"),
        # The checkout that it lies in, which comes first.
        (["pyproject.toml", "jaxslowmo/__init__.py", f"content/{WHEEL}"], {}, ""),
        ([], {"REPOSITORY": ADDRESS}, f"jaxslowmo @ git+{ADDRESS}"),
        ([], {"SOURCE": "/somewhere/here.whl", "REPOSITORY": ADDRESS}, "/somewhere/here.whl"),
        # A name that is set is a file or folder, and never a package of an index.
        ([], {"SOURCE": "jaxslowmo", "REPOSITORY": ADDRESS}, "/here/jaxslowmo"),
    ],
)
def test_what_it_takes(install, tmp_path, files, lines, taken):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert install(**lines) == taken


def test_where_there_is_nothing_it_says_what_to_do_and_nothing_where_the_package_is_installed(
    install, monkeypatch
):
    with pytest.raises(Exception, match="upload a wheel of jaxslowmo") as error:
        install(REPOSITORY="")
    (line,) = error.value._render_traceback_()
    assert "\n" not in line
    assert "fill in SOURCE" in line
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.0")
    assert install() is None


def test_all_look_in_the_same_places_and_are_committed_without_outputs():
    heads = {cell(notebook).partition("    SOURCE = SOURCE or")[0] for notebook in NOTEBOOKS}
    assert len(heads) == 1
    for path in (ROOT / "colab").glob("*.ipynb"):
        cells = json.loads(path.read_text("utf-8"))["cells"]
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
