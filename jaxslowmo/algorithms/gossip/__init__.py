"""The machinery of sgp: what a round sends, and the algebra of push-sum."""

from ._coded import pulled_with_residual as pulled_with_residual
from ._coded import unsent as unsent
from ._exchange import Arrival as Arrival
from ._exchange import Gossip as Gossip
from ._exchange import any_round as any_round
from ._exchange import round_event as round_event
from ._exchange import round_number as round_number
from ._plan import GossipPlan as GossipPlan
from ._plan import checked_overlap as checked_overlap
from ._plan import gossip_plan as gossip_plan
from ._push_sum import over as over
from ._push_sum import pulled as pulled
from ._push_sum import together as together
from ._push_sum import total_mass as total_mass
from ._state import SGPState as SGPState
from ._state import shares_of_gossip as shares_of_gossip
