"""Docstrings begin with sentences, arguments say what they are, names what they hold.

`tools/plain_english.py` has the rules and the exceptions, each with its reason.
"""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("plain_english", ROOT / "tools/plain_english.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("folder", ["jaxslowmo", "torch_compat"])
def test_a_folder_is_plain_english(tool, folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert len(files) > 20
    places = [str(place) for file in files for place in tool.findings(file)]
    assert not places, "\n".join(places)


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ('"""Of its arguments."""', "docstring"),
        ('def f():\n    """The sum."""', "docstring"),
        ('def f():\n    """Whether there is one."""', "docstring"),
        ('def f():\n    """Returns the sum."""', "docstring"),
        ('def f():\n    """`x` as it is."""', "docstring"),
        (
            'def f(x):\n    """Return it.\n\n    Args:\n      x: of this process.\n    """',
            "argument",
        ),
        ('class A:\n    """A.\n\n    Attributes:\n      x, y: as before.\n    """', "argument"),
        ("found = 1", "name"),
        ("def f(own): ...", "name"),
        ("class _Moved: ...", "name"),
        ("for told in (): ...", "name"),
    ],
)
def test_what_is_no_plain_english_is_found(tool, tmp_path, monkeypatch, code, rule):
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    (tmp_path / "file.py").write_text(code)
    assert [place.rule for place in tool.findings(tmp_path / "file.py")] == [rule]


@pytest.mark.parametrize(
    "code",
    [
        '"""The roles of the arguments."""',
        'def f():\n    """Return whether there is one."""',
        'def f():\n    """Process a batch."""',
        'class A:\n    @property\n    def x(self):\n        """The sum."""',
        'def f(x):\n    """Return it.\n\n    Args:\n      x: index of this process.\n    """',
        'def f(x):\n    """Return it.\n\n    Raises:\n      ValueError: in a loop.\n    """',
        "found_axes = 1",
    ],
)
def test_plain_english_is_left_alone(tool, tmp_path, monkeypatch, code):
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    (tmp_path / "file.py").write_text(code)
    assert list(tool.findings(tmp_path / "file.py")) == []


def test_every_exception_is_needed(tool):
    """An exception whose place has gone is taken off the list."""
    exceptions = dict(tool.EXCEPTIONS)
    assert all(exceptions.values()), "each has a reason"
    for key in exceptions:
        path, _, _ = key.partition(":")
        tool.EXCEPTIONS.pop(key)
        try:
            assert list(tool.findings(ROOT / path)), key
        finally:
            tool.EXCEPTIONS[key] = exceptions[key]
