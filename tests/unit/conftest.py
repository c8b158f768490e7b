"""What spares every unit test some time."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import certifi
import pytest

END = "-----END CERTIFICATE-----\n"
MEMORY, ENOUGH_BYTES = Path("/dev/shm"), 1 << 30

if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ENOUGH_BYTES:
    # Stores flush to the disk at every step; on a busy one that is most of their tests' time.
    tempfile.tempdir = os.environ["TMPDIR"] = str(MEMORY)


@pytest.fixture(scope="session", autouse=True)
def one_certificate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One of the world's certificates for each HTTP client to read, not all: no test here speaks TLS."""
    one = tmp_path_factory.mktemp("certificates") / "one.pem"
    one.write_text(Path(certifi.where()).read_text().partition(END)[0] + END)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "SSL_CERT_FILE", str(one))
        yield
