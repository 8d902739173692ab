"""The notebooks' first code cell: where it takes the package from, and what it says where it cannot."""

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ["slowmo_on_tpu", "tpu_manager"]
WHEEL = "jaxslowmo-0.2.0-py3-none-any.whl"
ADDRESS = "https://git.example.org/group/name"


def cell(notebook: str) -> str:
    path = ROOT / "colab" / f"{notebook}.ipynb"
    return "".join(json.loads(path.read_text("utf-8"))["cells"][2]["source"])


@pytest.fixture(params=NOTEBOOKS)
def install(request, monkeypatch, tmp_path):
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
        code = cell(request.param).replace('"/content', f'"{tmp_path}/content')
        for name, value in lines.items():
            code, times = re.subn(rf'^{name} = "[^"]*"', f'{name} = "{value}"', code, flags=re.M)
            assert times == 1
        asked.clear()
        exec(compile(code, request.param, "exec"), {"__name__": "__main__"})
        marks = (str(tmp_path), "://", "/somewhere")
        ours = [p for call in asked for p in call if any(mark in p for mark in marks)]
        assert len(ours) <= 1
        return ours[0].replace("[train]", "").replace(str(tmp_path), "") if ours else None

    return execute


def touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def test_it_takes_an_uploaded_wheel(install, tmp_path):
    touch(tmp_path / "content" / WHEEL)
    assert install() == f"/content/{WHEEL}"


def test_it_takes_a_wheel_beside_the_notebook(install, tmp_path):
    touch(tmp_path / "here" / WHEEL)
    assert install() == f"/here/{WHEEL}"


@pytest.mark.parametrize("place", ["content", "content/drive/MyDrive"])
def test_it_takes_a_checkout_that_is_uploaded_or_mounted(install, tmp_path, place):
    touch(tmp_path / place / "jaxslowmo/pyproject.toml")
    assert install() == f"/{place}/jaxslowmo"


def test_it_takes_the_checkout_it_lies_in(install, monkeypatch, tmp_path):
    touch(tmp_path / "pyproject.toml")
    touch(tmp_path / "jaxslowmo/__init__.py")
    touch(tmp_path / "content" / WHEEL)
    assert install() == ""  # the folder itself


def test_it_takes_the_address_of_the_repository(install):
    assert install(REPOSITORY=ADDRESS) == f"jaxslowmo @ git+{ADDRESS}"


@pytest.mark.parametrize("source", ["git+https://git.example.org/other", "/somewhere/here.whl"])
def test_it_takes_what_is_set(install, source):
    expected = f"jaxslowmo @ {source}" if "://" in source else source
    assert install(SOURCE=source, REPOSITORY=ADDRESS) == expected


@pytest.mark.parametrize("source", ["jaxslowmo", "./wheels/one.whl"])
def test_a_name_that_is_set_is_a_file_or_folder_and_never_a_package_of_an_index(install, source):
    assert install(SOURCE=source, REPOSITORY=ADDRESS) == f"/here/{source.removeprefix('./')}"


def test_it_says_in_one_line_what_to_do_where_there_is_nothing(install):
    with pytest.raises(Exception, match="upload a wheel of jaxslowmo") as error:
        install(REPOSITORY="")
    assert type(error.value).__name__ == "Missing"
    (line,) = error.value._render_traceback_()
    assert "\n" not in line
    assert "fill in SOURCE" in line


def test_it_says_where_pip_failed(install, monkeypatch):
    def run(call: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(call, 1, stdout="")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(Exception, match=r"^pip could not install from /no\.whl: what it said"):
        install(SOURCE="/no.whl")


def test_it_does_nothing_where_the_package_is_installed(install, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.0")
    assert install() is None


def test_both_notebooks_look_in_the_same_places():
    heads = {cell(notebook).partition("    SOURCE = SOURCE or")[0] for notebook in NOTEBOOKS}
    assert len(heads) == 1


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A checkout, a wheel of it, and a bare repository of it."""
    top = tmp_path_factory.mktemp("sources")
    folder = top / "jaxslowmo"
    for name in ("jaxslowmo", "torch_compat", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)

    def run(*call: str) -> None:
        subprocess.run(call, cwd=folder, check=True, capture_output=True)

    run(sys.executable, "-c", f"import hatchling.build as b; b.build_wheel({str(top)!r})")
    run("git", "init", "--quiet")
    run("git", "add", ".")
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    run("git", *identity, "commit", "--quiet", "--message", "all")
    run("git", "clone", "--quiet", "--bare", ".", str(top / "bare.git"))
    return {"folder": f"{folder}", "wheel": f"{top / WHEEL}", "git": f"git+file://{top}/bare.git"}


@pytest.mark.parametrize("kind", ["folder", "wheel", "git"])
def test_pip_installs_from_what_the_cell_gives_it(sources, tmp_path, monkeypatch, kind):
    real = subprocess.run
    target = tmp_path / "installed"
    # Into a folder of its own, without a network: what it is given must do.
    options = ["--no-build-isolation", "--no-index", f"--target={target}"]

    def run(call: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        if "torch==2.9.*" in call:
            return subprocess.CompletedProcess(call, 0, stdout="")
        return real([*call, *options], **kwargs)

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(importlib.metadata, "version", version)
    code = cell("tpu_manager").replace('SOURCE = ""', f'SOURCE = "{sources[kind]}"')
    exec(compile(code, "tpu_manager", "exec"), {"__name__": "__main__"})
    assert (target / "torch_compat/manager/__init__.py").is_file()
    assert (target / "jaxslowmo/py.typed").is_file()
