"""What parts say of themselves: base classes of algorithms that exchange, and what they use."""

from .._due import Every as Every
from .._due import phase_scope as phase_scope
from .._due import run_if as run_if
from .._gradients import OwnReductionState as OwnReductionState
from .._gradients import Reduction as Reduction
from .._replica_exchange import Exchange as Exchange
from .._sent import Sent as Sent
from .._sync import Beside as Beside
from .._sync import Event as Event
from .._sync import Now as Now
from .._sync import Sync as Sync
from .._wrapper import Wrapper as Wrapper
