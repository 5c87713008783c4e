"""The machine that something was measured on, in words."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import numpy as np
import torch


def describe() -> dict[str, str | int]:
    """What a reader needs to know about where figures come from."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "system": platform.platform(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "gil": "on" if getattr(sys, "_is_gil_enabled", lambda: True)() else "off",
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
