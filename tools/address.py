"""The address of the repository, from `repository` under `[tool.jaxslowmo]` in pyproject.toml.

    python tools/address.py    after that line has changed: writes it where files must hold it

Links of the package's metadata and of the documentation site follow when they are built. Written
into files are the badges that open the notebooks in Colab (README, notebooks), the address that
their first cells install from, and the line with it in the page that says how to install.
"""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ("colab/slowmo_on_tpu.ipynb", "colab/tpu_manager.ipynb", "colab/islands.ipynb")
_BADGE = "https://colab.research.google.com/assets/colab-badge.svg"
_COLAB = "https://colab.research.google.com/github"
_GITHUB = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+)")
# An image or a link in markdown: its mark, its text, where it leads.
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"^<!-- [^\n]* -->\n", re.MULTILINE)


class Address(NamedTuple):
    """Where the repository is; `repository` is empty as long as nobody has said so."""

    repository: str
    branch: str = "main"

    def page(self, path: str) -> str:
        """Where a file of the repository, or a heading of its README (`#...`), can be read."""
        if path.startswith("#"):
            return f"{self.repository}{path}"
        return f"{self.repository}/blob/{self.branch}/{path}"

    def raw(self, path: str) -> str:
        """Where a file of the repository can be loaded from."""
        return f"{self.repository}/raw/{self.branch}/{path}"

    def badge(self, notebook: str) -> str:
        """Markdown that opens the notebook in Colab, which knows GitHub only; else empty."""
        found = _GITHUB.fullmatch(self.repository)
        if not found:
            return ""
        return f"[![Open in Colab]({_BADGE})]({_COLAB}/{found[1]}/blob/{self.branch}/{notebook})"


def read() -> Address:
    """The address that pyproject.toml has."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return Address(**settings["tool"]["jaxslowmo"])


def check(address: Address) -> None:
    """Refuses what links cannot be made of.

    Raises:
      ValueError: unless `repository` is empty or an https address without a slash at its end.
    """
    if address.repository and not re.fullmatch(r"https://[\w.-]+(/[\w.-]+)+", address.repository):
        raise ValueError(
            "`repository` must be empty or an address such as https://github.com/owner/name, "
            f"got {address.repository!r}."
        )


def outside(text: str, address: Address) -> str:
    """A README for elsewhere: links lead to the repository, or are text while it has none."""

    def absolute(link: re.Match[str]) -> str:
        mark, said, target = link.groups()
        if target.startswith(("https:", "http:")):
            return link[0]
        if not address.repository:
            return "" if mark else said
        return f"{mark}[{said}]({address.raw(target) if mark else address.page(target)})"

    parts = _FENCED.split(_COMMENT.sub("", text))
    parts[::2] = [re.sub(r"\n{3,}", "\n\n", _LINK.sub(absolute, part)) for part in parts[::2]]
    return "".join(parts)


def urls(address: Address) -> dict[str, str]:
    """Addresses for the package's metadata."""
    if not address.repository:
        return {}
    return {
        "Repository": address.repository,
        "Documentation": address.page("docs/index.md"),
        "Changelog": address.page("CHANGELOG.md"),
    }


def written(address: Address) -> Iterator[tuple[Path, str]]:
    """Every file that holds the address, and what it says then."""
    badges = "\n".join(filter(None, map(address.badge, NOTEBOOKS)))
    readme = ROOT / "README.md"
    text = re.sub(r"(?m)^\[!\[Open in Colab\].*\n+", "", readme.read_text("utf-8"))
    title, rest = text.split("\n", 1)
    yield readme, f"{title}\n\n{badges}\n{rest}" if badges else text
    start = ROOT / "docs" / "start.md"
    text = re.sub(r"(?m)^pip install .* @ git\+.*\n", "", start.read_text("utf-8"))
    line = f"pip install 'jaxslowmo[train] @ git+{address.repository}'\n"
    shown = rf"\g<1>{line if address.repository else ''}"
    yield start, _once(r"(?m)(^pip install 'dist/.*\n)", shown, text)
    for name in NOTEBOOKS:
        notebook = json.loads((ROOT / name).read_text(encoding="utf-8"))
        title, _, install = notebook["cells"][:3]
        heading = "".join(title["source"]).partition("\n[![Open in Colab]")[0].rstrip("\n")
        badge = address.badge(name)
        title["source"] = (heading + (f"\n\n{badge}" if badge else "")).splitlines(keepends=True)
        line = f'REPOSITORY = "{address.repository}"'
        code = _once(r'REPOSITORY = "[^"]*"', line, "".join(install["source"]))
        install["source"] = code.splitlines(keepends=True)
        yield ROOT / name, json.dumps(notebook, ensure_ascii=False, indent=1) + "\n"


def _once(pattern: str, by: str, text: str) -> str:
    changed, times = re.subn(pattern, by, text)
    if times != 1:
        raise ValueError(f"`text` must have {pattern!r} once, got it {times} times.")
    return changed


def main() -> None:
    """Writes the address of pyproject.toml into all files that hold it."""
    address = read()
    check(address)
    for path, text in written(address):
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    if address.repository and not address.badge(NOTEBOOKS[0]):
        print("no badges: Colab opens notebooks from https://github.com only")


if __name__ == "__main__":
    main()
