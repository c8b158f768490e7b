"""Makes the scripts of deploy/local importable, as Python does when it runs one of them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "deploy" / "local"))
