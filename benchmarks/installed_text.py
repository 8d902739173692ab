"""Source code of the packages that are installed here, as text for language models.

    python benchmarks/installed_text.py --out FOLDER

A machine without a network has this text anyway. It takes the source files of the standard library
and of all packages that pip lists, each content once. Some packages are held out, drawn by the
seed: a whole family of packages (`pytest` and `pytest-cov`) is either in the training text or held
out. A package that shares most of its lines with the training text, as a vendored copy does, is not
held out. The folder gets `training.npy` and `held_out.npy` (bytes), `files.tsv` (each file with
family, bytes and SHA-256) and `text.json` (each family with its packages, licences and bytes).

It is code and comments, mostly Python, C++ and CUDA headers, with licence texts at the top of many
files. It is not prose, and not the same on machines with other packages: `fingerprint` tells.
"""

import argparse
import hashlib
import importlib.metadata
import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

PYTHON = (".py", ".pyi", ".pyx", ".pxd")
SUFFIXES = (*PYTHON, ".c", ".cc", ".cpp", ".cxx", ".cu", ".cuh", ".h", ".hh", ".hpp", ".inl")
ENOUGH_BYTES = 200e6
HELD_OUT = 24  # families, if no more than a third of those of a suitable size
HELD_OUT_BYTES = (65_536, 2_000_000)  # least and most of a held-out family
LONG_LINE = 24  # bytes; shorter lines are alike in all programs
MOST_SHARED = 0.5  # of the long lines of a held-out family, with the training text


@dataclass
class Family:
    """Packages whose names begin with the same word, and their source files.

    Attributes:
      packages: names and versions.
      licences: what the metadata of the packages says.
      files: paths and contents.
      shared: fraction of long lines that the training text has, too; None if not held out.
    """

    packages: list[str] = field(default_factory=list)
    licences: set[str] = field(default_factory=set)
    files: list[tuple[str, bytes]] = field(default_factory=list)
    shared: float | None = None

    @property
    def num_bytes(self) -> int:
        return sum(len(text) for _, text in self.files)


def licence_of(metadata: Any) -> str:
    """Return the licence that the metadata of a package states, in one line."""
    classifiers = metadata.get_all("Classifier", [])
    names = "; ".join(x.rpartition(" :: ")[2] for x in classifiers if x.startswith("License"))
    text = metadata.get("License", "").strip().partition("\n")[0]  # some have the whole licence
    return metadata.get("License-Expression") or names or text[:80] or "unknown"


def installed() -> Iterator[tuple[str, str, str, list[tuple[str, Path]]]]:
    """Yield name, version, licence and source files of each package, in order of the names."""
    folder = Path(sysconfig.get_path("stdlib"))
    others = {"site-packages", "dist-packages"}
    names = (path.relative_to(folder) for path in sorted(folder.rglob("*")))
    files = [(str(x), folder / x) for x in names if not others & {*x.parts}]
    yield "python", sys.version.split()[0], "PSF-2.0", files
    found = ((x.metadata["Name"], x) for x in importlib.metadata.distributions())
    packages = {name.lower(): x for name, x in found if name}  # a broken one has no name
    for name, package in sorted(packages.items()):
        files = [(str(x), Path(str(x.locate()))) for x in sorted(package.files or [])]
        yield name, package.version, licence_of(package.metadata), files


def gather(most_bytes: float = float("inf")) -> dict[str, Family]:
    """Return the families by name, without contents that an earlier one has.

    Args:
      most_bytes: no more packages are read after so many bytes, and no standard library.
    """
    families: dict[str, Family] = {}
    contents: set[bytes] = set()
    num_bytes, is_whole = 0, most_bytes == float("inf")
    for name, version, licence, paths in installed():
        if num_bytes >= most_bytes or (name == "python" and not is_whole):
            continue
        files = []
        for label, path in paths:
            if path.suffix not in SUFFIXES or not path.is_file():
                continue
            text = path.read_bytes()
            digest = hashlib.sha256(text).digest()
            if text and b"\0" not in text and digest not in contents:
                contents.add(digest)
                files.append((label, text))
        if files:
            family = families.setdefault(name.replace("_", "-").partition("-")[0], Family())
            family.packages.append(f"{name} {version}")
            family.licences.add(licence)
            family.files += files
            num_bytes += sum(len(text) for _, text in files)
    return families


def long_lines(families: Iterable[Family]) -> Iterator[bytes]:
    """Yield the lines of the files, stripped, that are long enough to tell programs apart."""
    for family in families:
        for _, text in family.files:
            for line in text.splitlines():
                stripped = line.strip()
                if len(stripped) >= LONG_LINE:
                    yield stripped


def hold_out(families: dict[str, Family], seed: int) -> list[str]:
    """Return the names of the families to hold out, and set their `shared`."""
    least, most = HELD_OUT_BYTES
    suitable = sorted(name for name, x in families.items() if least <= x.num_bytes <= most)
    order = np.random.default_rng([seed, 0]).permutation(suitable).tolist()
    chosen = order[: min(HELD_OUT, len(suitable) // 3)]
    while True:
        lines = {name: list(long_lines([families[name]])) for name in chosen}
        wanted = set().union(*lines.values())
        training = (family for name, family in families.items() if name not in chosen)
        shared = {line for line in long_lines(training) if line in wanted}
        for name, own in lines.items():
            families[name].shared = sum(line in shared for line in own) / max(1, len(own))
        kept = [name for name in chosen if (families[name].shared or 0) <= MOST_SHARED]
        if kept == chosen:
            return sorted(chosen)
        for name in set(chosen) - set(kept):  # now training text, which others may share lines with
            families[name].shared = None
        chosen = kept


def write(folder: Path, seed: int = 0, most_bytes: float = float("inf")) -> dict[str, Any]:
    """Write the text to a folder, and return what `text.json` says.

    Raises:
      ValueError: there are too few packages to hold any out.
    """
    families = gather(most_bytes)
    held_out = hold_out(families, seed)
    if not held_out:
        raise ValueError(
            f"`most_bytes` must leave three families of {HELD_OUT_BYTES} bytes, "
            f"found {', '.join(sorted(families)) or 'none'}"
        )
    files, listing, rows = [], [], []
    for name, family in sorted(families.items()):
        is_held_out = name in held_out
        for label, text in family.files:
            part = "held out" if is_held_out else "training"
            digest = hashlib.sha256(text).hexdigest()
            listing.append(f"{part}\t{name}\t{len(text)}\t{digest}\t{label}")
            if not is_held_out:
                files.append(text)
        rows.append(
            {
                "family": name,
                "packages": family.packages,
                "licences": sorted(family.licences),
                "files": len(family.files),
                "bytes": family.num_bytes,
                "held_out": is_held_out,
                "shared_lines": None if family.shared is None else round(family.shared, 3),
            }
        )
    # In one order of all files, so that each replica's part is a sample of all packages.
    order = np.random.default_rng([seed, 1]).permutation(len(files))
    folder.mkdir(parents=True, exist_ok=True)
    training = np.frombuffer(b"".join(files[i] for i in order), np.uint8)
    np.save(folder / "training.npy", training)
    texts = [b"".join(text for _, text in families[name].files) for name in held_out]
    np.save(folder / "held_out.npy", np.frombuffer(b"".join(texts), np.uint8))
    lines = "\n".join(listing) + "\n"
    (folder / "files.tsv").write_text(lines, "utf-8")
    summary = {
        "seed": seed,
        "training_bytes": training.size,
        "held_out": {name: len(text) for name, text in zip(held_out, texts, strict=True)},
        "files": len(listing),
        "fingerprint": hashlib.sha256(f"{seed}\n{lines}".encode()).hexdigest()[:16],
        "families": rows,
    }
    (folder / "text.json").write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
    return summary


def describe(summary: dict[str, Any]) -> str:
    """Return in words how much text there is, with a warning if that is little."""
    text = (
        f"{summary['training_bytes'] / 1e6:.1f} MB of source code to train on, "
        f"{sum(summary['held_out'].values()) / 1e6:.1f} MB of {len(summary['held_out'])} held-out "
        f"families of packages; {summary['files']} files; fingerprint {summary['fingerprint']}"
    )
    if summary["training_bytes"] < ENOUGH_BYTES:
        text += f"\nWARNING: less than {ENOUGH_BYTES / 1e6:.0f} MB: large models see it repeatedly."
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the text")
    parser.add_argument("--seed", type=int, default=0, help="which packages are held out")
    arguments = parser.parse_args()
    print(describe(write(arguments.out, arguments.seed)))


if __name__ == "__main__":
    main()
