"""What a work-horse would import at its first use is imported before any is forked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from taphouse_extractor import main
from taphouse_extractor.settings import Settings

class Leases:
    def present(self, *_): pass
    def absent(self, *_): pass

main.leases_of = lambda _: Leases()
main.run_worker = lambda *_, **__: print("httpcore" in sys.modules)
main.work(Settings(_cli_parse_args=[]))
"""


def test_a_worker_has_its_http_client_before_it_forks(tmp_path: Path) -> None:
    env = {**os.environ, "TAPHOUSE_EXTRACTOR_STORE": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True)
    assert ran.stdout == "True\n"
