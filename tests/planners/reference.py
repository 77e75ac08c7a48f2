"""Reference instances of the source papers' planners, with the values that others found for them.

`reference_cases.json` says of each section where its numbers come from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CASES: dict[str, Any] = json.loads((Path(__file__).parent / "reference_cases.json").read_text())
