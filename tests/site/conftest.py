"""What the site is made with lies beside its pages."""

import sys
from pathlib import Path

HOOKS = Path(__file__).parents[2] / "docs" / "_hooks"
sys.path.insert(0, str(HOOKS))  # as mkdocs does while it loads a hook
