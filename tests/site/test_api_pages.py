"""Every public name is described on exactly one page of the API, and listed at the top of it."""

import importlib
import re
import types
from collections import Counter
from pathlib import Path

import api_pages
import names

import jaxslowmo

DOCS = Path(__file__).parents[2] / "docs"
# Modules whose own names are public, as users write them.
TOPICS = [
    "topology",
    "hooks",
    "codecs",
    "schedules",
    "spec",
    "pipeline",
    "checkpoint",
    "data",
    "models",
]


def rendered() -> dict[str, str]:
    """The pages of the API with their names filled in."""
    return {
        path.name: api_pages.on_page_markdown(path.read_text("utf-8"))
        for path in sorted((DOCS / "api").glob("*.md"))
    }


def importable() -> set[str]:
    """Dotted public names, asked of the modules themselves."""

    def below(prefix: str, module: types.ModuleType) -> set[str]:
        kept = {k: v for k, v in vars(module).items() if not k.startswith("_")}
        modules = {k for k, v in kept.items() if isinstance(v, types.ModuleType)}
        return {f"{prefix}.{name}" for name in kept.keys() - modules}

    modules = {f"jaxslowmo.{t}": importlib.import_module(f"jaxslowmo.{t}") for t in TOPICS[6:]}
    modules |= {f"jaxslowmo.{t}": getattr(jaxslowmo, t) for t in TOPICS[:6]}
    found = set().union(*(below(prefix, module) for prefix, module in modules.items()))
    top = {n for n in jaxslowmo.__all__ if not isinstance(getattr(jaxslowmo, n), types.ModuleType)}
    # A name that js.pipeline shares with the top level is described once, as the top level's.
    found -= {f"jaxslowmo.pipeline.{name}" for name in top}
    return found | {f"jaxslowmo.{name}" for name in top}


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
        listed = dict(re.findall(r"^\| \[`[\w.]+`\]\[([\w.]+)\] \| (.*) \|$", text, re.M))
        assert [*listed] == [name for name in entries if name != "torch_compat.runtime"], page
        assert all(listed.values()), page


def test_every_package_with_public_names_has_a_page():
    pages = "".join(path.read_text("utf-8") for path in (DOCS / "api").glob("*.md"))
    marked = api_pages.MARK.findall(pages)
    assert sorted(marked) == sorted(names.public_names())
