"""Looks at the built site as its readers do: the search finds by name, every public name is there.

python tools/check_site.py    after mkdocs has built `site/`; what is wrong, and exit code 1
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lunr.builder import Builder
from lunr.pipeline import Pipeline
from lunr.stop_word_filter import stop_word_filter
from lunr.token import Token

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "site"
sys.path.insert(0, str(ROOT / "docs" / "_hooks"))

from names import public_names  # noqa: E402

# What readers type, and the page or section that must come first.
FOUND_FIRST = {
    "slowmo": "api/algorithms/#jaxslowmo.slowmo",
    "js.slowmo": "api/algorithms/#jaxslowmo.slowmo",
    "local_sgd": "api/algorithms/#jaxslowmo.local_sgd",
    "local sgd": "api/algorithms/#jaxslowmo.local_sgd",
    "diloco": "api/algorithms/#jaxslowmo.diloco",
    "sgp": "api/algorithms/#jaxslowmo.sgp",
    "all_reduce_gradients": "api/gradients/#jaxslowmo.all_reduce_gradients",
    "powersgd": "api/hooks/#jaxslowmo.hooks.powersgd",
    "make_mesh": "api/mesh/#jaxslowmo.make_mesh",
    "comm_report": "api/reports/#jaxslowmo.comm_report",
    "TPUManager": "torch/#tpumanager",
    "generator": "your-data/#a-generator",
    "dataloader": "your-data/#dataloader-of-torch",
    "grain": "your-data/#grain",
    "dropout": "recipes/optax/#dropout",
    "ema": "recipes/optax/#ema",
    "exponential moving average": "recipes/optax/#ema",
    "sample": "command-line/#sample",
    "nanogpt": "recipes/#a-script-with-pmap",
    "weight decay": "recipes/optax/#weight-decay",
    "frozen layers": "recipes/optax/#frozen-layers",
    "equinox": "recipes/models/#equinox",
    "haiku": "recipes/models/#haiku",
    "tensorboard": "recipes/#logging",
    "wandb": "recipes/#logging",
    "tqdm": "recipes/#logging",
    "safetensors": "reading-state/#safetensors",
    "fsdp": "recipes/fsdp/",
}


class Search:
    """The site's search, as its theme runs it in the browser."""

    def __init__(self, index: dict[str, Any]) -> None:
        self._separator = re.compile(index["config"]["separator"])
        self._documents = {d["location"]: d for d in index["docs"]}
        builder = Builder()
        builder.b(0)  # long texts count as much as short ones
        builder.ref("location")
        builder.pipeline = Pipeline()
        builder.pipeline.add(stop_word_filter)
        builder.search_pipeline = Pipeline()
        for name, field in index["config"]["fields"].items():
            builder.field(name, boost=field["boost"], extractor=self._tokens(name))
        for document in index["docs"]:
            builder.add(document, {"boost": document.get("boost", 1)})
        self._index = builder.build()

    def _split(self, text: str) -> list[str]:
        return [word for word in self._separator.split(text.lower()) if word]

    def _tokens(self, name: str) -> Any:
        def extract(document: dict[str, Any]) -> list[Token]:
            text = re.sub(r"<[^>]*>", " ", document.get(name) or "")
            return [Token(word) for word in self._split(text)]

        return extract

    def sections(self, query: str) -> list[str]:
        """Sections of the page that comes first, best first."""
        words = self._split(query)
        scores: dict[str, float] = {}
        for found in self._index.search(" ".join(f"{word}*" for word in words)):
            terms = found["match_data"].metadata
            hit = sum(any(term.startswith(word) for term in terms) for word in words) / len(words)
            whole_page = "#" not in found["ref"]
            scores[found["ref"]] = found["score"] * (1 + (whole_page + hit) ** 2)
        ranked = sorted(scores, key=scores.__getitem__, reverse=True)
        pages = [place.partition("#")[0] for place in ranked]
        return [place for place, page in zip(ranked, pages, strict=True) if page == pages[0]]


def not_found(index: dict[str, Any]) -> Iterator[str]:
    """Queries that lead elsewhere than they should."""
    search = Search(index)
    for query, wanted in FOUND_FIRST.items():
        # The page itself is shown as the heading of its sections.
        found = [place for place in search.sections(query) if "#" in place] or ["nothing"]
        if not found[0].startswith(wanted):
            yield f"search {query!r}: {found[0]} comes first, not {wanted}"


def not_described() -> Iterator[str]:
    """Public names that do not stand on exactly one page."""
    anchors = Counter(
        anchor
        for page in SITE.glob("api/*/index.html")
        for anchor in re.findall(r'<h\d id="([\w.]+)" class="doc', page.read_text("utf-8"))
    )
    for name in public_names():
        if anchors[name] != 1:
            yield f"{name} stands on {anchors[name]} pages of the API"


def boxes() -> Iterator[str]:
    """Sections of docstrings that griffe does not know and makes boxes of."""
    for page in SITE.glob("api/*/index.html"):
        for kind in re.findall(r'<details class="(\w+)"', page.read_text("utf-8")):
            yield f"{page.parent.name}: a docstring's `{kind.title()}:` became a box"


def main() -> None:
    """Prints what is wrong and exits with 1, or says nothing."""
    index = json.loads((SITE / "search" / "search_index.json").read_text("utf-8"))
    wrong = [*not_found(index), *not_described(), *boxes()]
    print("\n".join(wrong), end="\n" if wrong else "")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
