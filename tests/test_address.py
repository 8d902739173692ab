"""The address of the repository stands in one place, and everything else follows from it."""

import json
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# What building the package, and writing the address, read.
FILES = [
    "LICENSE", "README.md", "pyproject.toml", "colab", "docs/start.md", "jaxslowmo/__init__.py",
    "tools/address.py", "tools/package_metadata.py", "torch_compat/__init__.py",
]  # fmt: skip
NONE, GITHUB = "", "https://github.com/example/name"
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture
def checkout(tmp_path):
    """A checkout whose pyproject.toml names an address."""

    def make(repository: str) -> Path:
        for name in FILES:
            target = tmp_path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            if not target.exists():
                copy(ROOT / name, target)
        project = tmp_path / "pyproject.toml"
        line = f'repository = "{repository}"'
        text, times = re.subn(r'^repository = ".*"$', line, project.read_text(), flags=re.M)
        assert times == 1
        project.write_text(text)
        return tmp_path

    return make


def write(checkout: Path) -> str:
    call = [sys.executable, checkout / "tools/address.py"]
    return subprocess.run(call, capture_output=True, text=True, check=True).stdout


def texts(checkout: Path) -> dict[str, str]:
    """Every file that may hold the address."""
    names = ["README.md", "docs/start.md", *(f"colab/{p.name}" for p in checkout.glob("colab/*"))]
    return {name: (checkout / name).read_text("utf-8") for name in names}


def metadata(checkout: Path) -> Message:
    """Of the wheel that is built from the checkout."""
    code = "import hatchling.build; print(hatchling.build.build_wheel('.'))"
    call = [sys.executable, "-c", code]
    done = subprocess.run(call, cwd=checkout, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(checkout / done.stdout.strip()) as wheel:
        (name,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
        return message_from_string(wheel.read(name).decode("utf-8"))


def test_files_say_what_pyproject_says():
    tools = runpy.run_path(str(ROOT / "tools/address.py"))
    tools["check"](tools["read"]())
    for path, text in tools["written"](tools["read"]()):
        assert path.read_text("utf-8") == text, f"python tools/address.py would change {path}"


def test_an_address_is_written_everywhere_and_leaves_without_a_trace(checkout):
    folder = checkout(NONE)
    write(folder)
    before = texts(folder)
    assert not any("example/name" in text for text in before.values())
    write(checkout(GITHUB))
    after = texts(folder)
    colab = "https://colab.research.google.com/github/example/name/blob/main/"
    for name, text in after.items():
        if name.startswith("colab"):
            first, _, install = json.loads(text)["cells"][:3]
            assert f"({colab}{name})" in "".join(first["source"])
            assert f'REPOSITORY = "{GITHUB}"\n' in install["source"]
            assert f"({colab}{name})" in after["README.md"]
    assert f"'jaxslowmo[train] @ git+{GITHUB}'" in after["docs/start.md"]
    assert write(folder) == ""
    write(checkout(NONE))
    assert texts(folder) == before


def test_metadata_leads_to_files_that_exist_and_without_an_address_nowhere(checkout):
    found = metadata(checkout(NONE))
    readme = found.get_payload()
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_all("Project-URL") is None
    assert [link for link in LINK.findall(readme) if not link.startswith("https://")] == []
    assert "<!--" not in readme
    found = metadata(checkout(GITHUB))
    readme = found.get_payload()
    assert f"Repository, {GITHUB}" in found.get_all("Project-URL", [])
    links = LINK.findall(readme)
    assert len(links) > 20
    kinds = {"blob": 0, "raw": 0}
    for link in links:
        assert link.startswith("https://"), link
        inside = re.fullmatch(rf"{GITHUB}/(blob|raw)/main/([^#]+)(?:#.*)?", link)
        if inside:
            kinds[inside[1]] += 1
            assert (ROOT / inside[2]).exists(), link
    assert kinds["blob"] > 15
    assert kinds["raw"] == readme.count("![Validation loss") == 1
