"""Islands: programs that train one model with each other through an object store.

island = js.islands.join("s3://bucket/run", name="paris", sync_every=200)
"""

from ._island import Island as Island
from ._island import IslandState as IslandState
from ._island import IslandStatus as IslandStatus
from ._island import Report as Report
from ._island import Status as Status
from ._island import join as join
from ._island import status as status
from ._island import transform as transform
from ._store import IslandsError as IslandsError
from ._store import StoreError as StoreError
