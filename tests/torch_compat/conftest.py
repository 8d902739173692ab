"""The process that runs these tests never touches an XLA device: devices live in its children."""

import os

# Before torch_xla is imported, which would otherwise choose, and warn about it.
os.environ.setdefault("PJRT_DEVICE", "CPU")
