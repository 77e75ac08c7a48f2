"""What the runtime costs, measured: one file a benchmark, and what they have shown in results/.

Nothing is fetched while they run. The DELTA_* variables are taken out of the environment, for torch reads them when it
is imported: a budget from outside would disturb.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
for _name in [name for name in os.environ if name.startswith("DELTA_")]:
    del os.environ[_name]
