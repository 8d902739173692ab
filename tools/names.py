"""Functions that are named by a bare participle or preposition, such as `joined` or `of`.

    python tools/names.py [FOLDER ...] [--list]

Such a name doesn't say what a function returns or does. Those that stay are in `KEPT`.
"""

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "jaxslowmo"
PREPOSITIONS = (
    "about above across after along among around as at before behind below beside between beyond "
    "by during for from in inside into like of on onto out over since than through to towards "
    "under until with within without"
)
# Participles without "ed". Those that are also the verb, such as `read` and `run`, aren't here.
IRREGULAR = (
    "begun bound built chosen dealt done drawn driven fed felt found given gone grown held hidden "
    "kept known laid left lent lost made meant met paid put said seen sent shown sold spent stood "
    "stored swept taken thought thrown told torn understood woven written"
)
VERBS = {"embed", "feed", "need", "seed"}
KEPT: dict[str, str] = {
    "jaxslowmo/algorithms/outer/_aggregate.py:norm_weighted": "public: js.norm_weighted",
    "jaxslowmo/checkpoint/_checkpoints.py:written": "public: a method of `Checkpoints`",
    "jaxslowmo/embedding/_bags.py:jagged": "public: the word of torchrec",
    "jaxslowmo/embedding/_embeddings.py:over": "public: a method of `js.Table`'s results",
    "jaxslowmo/embedding/_embeddings.py:pooled": "public: the word of torchrec",
    "jaxslowmo/islands/_store.py:put": "the object store's own word, beside get, delete and list",
    "jaxslowmo/pipeline/_make_pipeline.py:pipelined": "public",
    "jaxslowmo/pipeline/schedules/_kinds.py:interleaved": "public: the word of Megatron",
    "jaxslowmo/reports/_measured.py:measured": "public",
    "jaxslowmo/train/_with_exchange.py:compiled": "public: as `compiled` of a train step",
    "jaxslowmo/train/step/_ahead.py:compiled": "public: as `compiled` of a train step",
    "jaxslowmo/train/step/_in_flight.py:bounded": "public",
    "jaxslowmo/train/step/_train_step.py:compiled": "public: the programs that were compiled",
    "jaxslowmo/train/step/_train_step.py:placed": "public",
    "jaxslowmo/transform/_algorithm.py:bound": "that of the algorithm, beside its field `bind`",
    "jaxslowmo/transform/_parameter_transform.py:bound": "public: the transform for known axes",
}
"""The names that stay, as FILE:NAME, and why."""


def is_bare(name: str) -> bool:
    """Return whether a name is one participle or preposition."""
    word = name.strip("_")
    is_participle = word.endswith("ed") and "_" not in word and word not in VERBS
    return is_participle or word in f"{IRREGULAR} {PREPOSITIONS}".split()


def bare_names(folders: list[Path]) -> Iterator[tuple[Path, int, str]]:
    """Yield file, line and name of the functions with such names."""
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_bare(node.name):
                yield path, node.lineno, node.name


def main() -> int:
    """Print the counts; return 1 if a name is not in `KEPT`."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, default=[PACKAGE])
    parser.add_argument("--list", action="store_true", help="each, with its file and line")
    args = parser.parse_args()
    found = list(bare_names([folder.absolute() for folder in args.folders]))
    if args.list:
        for path, line, name in found:
            print(f"{path.relative_to(PACKAGE.parent)}:{line}: {name}")
    counts = Counter(path.relative_to(PACKAGE.parent).parts[1] for path, *_ in found)
    for name, count in sorted(counts.items()):
        print(f"{name} | {count}")
    keys = [f"{path.relative_to(PACKAGE.parent)}:{name}" for path, _, name in found]
    kept = sum(key in KEPT for key in keys)
    print(f"all | {len(found)}, {kept} of them kept for a reason")
    return 1 if kept < len(found) else 0


if __name__ == "__main__":
    sys.exit(main())
