"""The Ray runtime: placement, worker clusters, heartbeats, elastic scaling and jobs."""

import time

# when this process began to import the code of a worker, which takes seconds
IMPORT_STARTED_AT = time.time()
