"""The driver stand-in, compiled once."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.driver.stand_in import StandIn

SOURCE = Path(__file__).with_name("stand_in.c")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    path = tmp_path_factory.mktemp("driver") / "stand_in.so"
    subprocess.run(
        [
            compiler,
            "-std=c11",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-shared",
            "-fPIC",
            "-pthread",
            "-o",
            path,
            SOURCE,
        ],
        check=True,
    )
    return path


@pytest.fixture
def driver(library: Path) -> StandIn:
    """A driver of CUDA 12.8."""
    return StandIn(library)
