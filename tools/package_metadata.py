"""Gives the package's metadata a README and addresses that are true outside of the repository."""

import runpy
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

HERE = Path(__file__).parent


class AddressHook(MetadataHookInterface):
    """Called by hatchling whenever it builds the package."""

    def update(self, metadata: dict) -> None:
        """Fills in what pyproject.toml calls dynamic."""
        tools = runpy.run_path(str(HERE / "address.py"))
        address = tools["read"]()
        tools["check"](address)
        readme = (HERE.parent / "README.md").read_text(encoding="utf-8")
        text = tools["outside"](readme, address)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = tools["urls"](address)
