"""The example of an algorithm in CONTRIBUTING.md, made by running its text."""

import re
from pathlib import Path
from typing import Any

_PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
BLOCK = re.findall(
    r"^```python\n(.*?)^```$", _PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
)[0]
_names: dict[str, Any] = {"__name__": "contributing_easgd"}
exec(compile(BLOCK, f"{_PAGE.name}: An algorithm", "exec"), _names)
easgd = _names["easgd"]
