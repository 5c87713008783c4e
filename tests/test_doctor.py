"""`python -m hicache_sched doctor` says what there is, and fails where what was asked for is missing."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from hicache_sched import native
from hicache_sched.doctor import examine


def findings(**environ: str) -> dict[str, tuple[str, bool]]:
    return {finding.what: (finding.found, finding.is_missing) for finding in examine(environ)}


@pytest.mark.skipif(native.module is None, reason="needs the native part")
def test_with_the_native_part_a_burst_arrives_through_the_native_plane() -> None:
    found = findings()
    assert found["native part"] == ("there", False)
    assert found["a burst"] == ("arrived", False)
    assert found["data plane"] == ("native", False)


def test_without_the_native_part_it_says_why_and_a_burst_arrives_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "module", None)
    monkeypatch.setattr(native, "missing_because", "of a test")
    found = findings()
    assert found["native part"] == ("missing: of a test", False)
    assert found["a burst"] == ("arrived", False)
    assert found["data plane"] == ("python, because the native part is missing: of a test", False)


def test_a_native_plane_that_was_asked_for_and_cannot_be_had_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "module", None)
    what, is_missing = findings(HICACHE_SCHED_PLANE="native")["a burst"]
    assert is_missing
    assert 'plane="native" cannot be had' in what


def test_a_loop_that_was_asked_for_and_is_not_installed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert findings()["event loop"] == ("asyncio", False)
    assert findings(HICACHE_SCHED_EVENT_LOOP="uvloop")["event loop"] == ("asyncio", True)


def test_a_setting_that_makes_no_sense_is_named() -> None:
    what, is_missing = findings(HICACHE_SCHED_NUM_SLOTS="none")["settings"]
    assert is_missing
    assert what.startswith("HICACHE_SCHED_NUM_SLOTS='none'")


@pytest.mark.parametrize(("environ", "status"), [({}, 0), ({"HICACHE_SCHED_NUM_SLOTS": "0"}, 1)])
def test_the_command_prints_a_table_and_its_status_says_whether_anything_is_missing(
    environ: Any, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    ended = subprocess.run(
        [sys.executable, "-m", "hicache_sched", "doctor"], capture_output=True, text=True, timeout=100, check=False
    )
    assert (ended.returncode, ended.stderr) == (status, "")
    assert "native part" in ended.stdout
