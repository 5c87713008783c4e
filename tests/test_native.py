"""Whether the native part is there, and what is said where it is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from hicache_sched import native

ASK = "from hicache_sched import native; print(native.module is not None, native.missing_because)"


def answer(code: str, **env: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True, timeout=60, check=True
    )
    return ended.stdout.strip()


@pytest.mark.parametrize("value", ["0", "off", "False", " no "])
def test_the_variable_turns_it_off(value: str) -> None:
    assert answer(ASK, HICACHE_SCHED_NATIVE=value) == f"False HICACHE_SCHED_NATIVE={value}".strip()


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_it_was_built_with_the_package() -> None:
    assert answer(ASK, HICACHE_SCHED_NATIVE="1") == "True None"


def test_a_package_without_it_says_what_to_do() -> None:
    code = (
        "import importlib, builtins\n"
        "real = importlib.import_module\n"
        "def missing(name, *args):\n"
        "    if name == 'hicache_sched._native': raise ModuleNotFoundError(name)\n"
        "    return real(name, *args)\n"
        "importlib.import_module = missing\n" + ASK
    )
    assert answer(code, HICACHE_SCHED_NATIVE="1").startswith("False it was not built: install the package where")


def test_one_or_the_other_is_true() -> None:
    assert (native.module is None) == (native.missing_because is not None)
