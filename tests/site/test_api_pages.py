"""Every public name is described on exactly one page of the API, and listed at the top of it."""

import importlib
import pkgutil
import re
import types
from collections import Counter
from pathlib import Path

import api_pages

import jaxslowmo

DOCS = Path(__file__).parents[2] / "docs"


def rendered() -> dict[str, str]:
    """The pages of the API with their names filled in."""
    return {
        path.name: api_pages.on_page_markdown(path.read_text("utf-8"))
        for path in sorted((DOCS / "api").glob("*.md"))
    }


def importable() -> set[str]:
    """Dotted public names, asked of the modules themselves."""

    top = {name: getattr(jaxslowmo, name) for name in jaxslowmo.__all__}
    modules = {k: v for k, v in top.items() if isinstance(v, types.ModuleType)}
    for name in ("checkpoint", "data", "models"):  # imported by their own names
        modules[name] = importlib.import_module(f"jaxslowmo.{name}")
    found = {f"jaxslowmo.{name}" for name in top.keys() - modules}
    for topic, module in modules.items():
        public = getattr(module, "__all__", None) or [n for n in vars(module) if n[0] != "_"]
        values = {name: getattr(module, name) for name in public}
        # What a module shares with the top level is described once, as the top level's.
        found |= {
            f"jaxslowmo.{topic}.{name}"
            for name, value in values.items()
            if not isinstance(value, types.ModuleType) and top.get(name) is not value
        }
    return found


def test_every_public_name_is_described_on_exactly_one_page():
    described = Counter(
        name for text in rendered().values() for name in re.findall(r"^::: ([\w.]+)$", text, re.M)
    )
    assert max(described.values()) == 1
    ours = {name for name in described if name.startswith("jaxslowmo.")}
    assert ours == importable()
    # Read without torch, which this environment does not have.
    torch_names = set()
    for package in ("torch_compat", "torch_compat.on_jax"):
        init = DOCS.parent / package.replace(".", "/") / "__init__.py"
        found = re.findall(r"^ *from .* as ([A-Za-z]\w+)$", init.read_text("utf-8"), re.M)
        torch_names |= {f"{package}.{name}" for name in found if name != "on_jax"}
    assert described.keys() - ours == torch_names


def test_names_are_listed_with_what_they_are():
    for page, text in rendered().items():
        entries = re.findall(r"^::: ([\w.]+)$", text, re.M)
        listed = dict(api_pages.ROW.findall("".join(api_pages.TABLE.findall(text))))
        assert len(listed) == len([name for name in entries if name != "torch_compat.runtime"])
        assert all(listed.values()), page
        assert api_pages.with_summaries(text) == text, "run python docs/_hooks/api_pages.py"


def test_links_from_docstrings_lead_to_headings_of_their_page():
    linked = 0
    for page, text in rendered().items():
        for path in re.findall(r"^::: (jaxslowmo\.[\w.]+)$", text, re.MULTILINE):
            doc = pkgutil.resolve_name(path).__doc__ or ""
            for target, anchor in re.findall(r"\[docs/api/(\S+)\]\(#(\S+)\)", doc):
                assert target == page, path
                assert f" {{#{path}--{anchor}}}\n" in text, path  # as mkdocstrings makes of it
                linked += 1
    assert linked
