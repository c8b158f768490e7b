"""Each distribution installs by itself: wheels are built and imported outside the development environment."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = {
    "taphouse": ROOT / "client",
    "taphouse_extractor": ROOT / "services/extractor",
    "taphouse_tap": ROOT / "services/extractor/tap",
    "taphouse_trainer": ROOT / "services/trainer",
}


def run(*command: object, **kwargs: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("wheels")
    for source in DISTRIBUTIONS.values():
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source)
    return {name: next(out.glob(f"{name}-*.whl")) for name in DISTRIBUTIONS}


def bare_environment(tmp_path: Path, *requirements: object) -> Path:
    run(sys.executable, "-m", "uv", "venv", "--python", sys.executable, tmp_path / "env")
    python = tmp_path / "env/bin/python"
    run(sys.executable, "-m", "uv", "pip", "install", "--python", python, *requirements)
    return python


def beside_engine(tmp_path: Path, wheels: list[Path]) -> dict[str, str]:
    """Install wheels with --no-deps into a folder that precedes this environment's packages."""
    target = tmp_path / "site"
    run(sys.executable, "-m", "uv", "pip", "install", "--no-deps", "--target", target, *wheels)
    return {"PYTHONPATH": str(target), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}


def test_client_needs_neither_torch_nor_the_cli_extra(wheels: dict[str, Path], tmp_path: Path) -> None:
    python = bare_environment(tmp_path, wheels["taphouse"])
    run(
        python,
        "-c",
        "import taphouse.client, taphouse.wire, taphouse.shards, taphouse.ledger, taphouse.slices",
    )
    absent = (
        "import importlib.util as u; print([m for m in ('torch','vllm','redis','typer') if u.find_spec(m)])"
    )
    assert run(python, "-c", absent).strip() == "[]"
    refused = subprocess.run([python.parent / "taphouse"], capture_output=True, text=True)
    assert refused.returncode != 0
    assert "taphouse[cli]" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_extractor_runs_in_a_bare_environment(wheels: dict[str, Path], tmp_path: Path) -> None:
    python = bare_environment(tmp_path, wheels["taphouse"], wheels["taphouse_extractor"])
    assert "usage" in run(python.parent / "taphouse-extractor", "--help").lower()
    run(python, "-c", "import importlib.util as u; assert u.find_spec('taphouse_tap') is None")


def test_tap_installs_beside_vllm_with_no_deps(wheels: dict[str, Path], tmp_path: Path) -> None:
    env = beside_engine(tmp_path, [wheels["taphouse"], wheels["taphouse_tap"]])
    where = run(sys.executable, "-c", "import taphouse_tap.worker as w; print(w.__file__)", env=env)
    assert str(tmp_path) in where
    find = (
        "from importlib.metadata import entry_points as e;"
        "print([p.load().__module__ for p in e(group='vllm.endpoint_plugins') if p.name == 'taphouse'])"
    )
    assert "taphouse_tap.plugin" in run(sys.executable, "-c", find, env=env)


def test_trainer_imports_from_its_wheel(wheels: dict[str, Path], tmp_path: Path) -> None:
    env = beside_engine(tmp_path, [wheels["taphouse"], wheels["taphouse_trainer"]])
    loaded = "import taphouse_trainer.main as m, sys; print(m.__file__, 'vllm' in sys.modules)"
    where = run(sys.executable, "-c", loaded, env=env)
    assert str(tmp_path) in where
    assert where.split()[-1] == "False"


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_wheel_holds_one_package_and_its_types(wheels: dict[str, Path], name: str) -> None:
    names = zipfile.ZipFile(wheels[name]).namelist()
    tops = {entry.split("/")[0] for entry in names if ".dist-info/" not in entry}
    assert tops == {name}
    assert f"{name}/py.typed" in names
