"""Plants the fault that the environment names, in this process and in all that it starts; see planted_faults."""

import os
import sys

if os.environ.get("SERL_CHUNK_PLANT"):
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import planted_faults
    import pytest

    planted_faults.FAULTS[os.environ["SERL_CHUNK_PLANT"]].plant(pytest.MonkeyPatch())
