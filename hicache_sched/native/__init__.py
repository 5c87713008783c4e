"""The native part: `hicache_sched._native`, built with the package where there is a compiler.

Everything works without it, with the GIL. The variable `HICACHE_SCHED_NATIVE=0` turns it off.

Attributes:
    module: the extension module, None where there is none.
    missing_because: why there is none; None where there is.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

SWITCH = "HICACHE_SCHED_NATIVE"


def _load() -> tuple[Any, str | None]:
    if os.environ.get(SWITCH, "").strip().lower() in ("0", "false", "no", "off"):
        return None, f"{SWITCH}={os.environ[SWITCH]}"
    try:
        return importlib.import_module("hicache_sched._native"), None
    except ModuleNotFoundError:
        return None, "it was not built: install the package where there is a C++ compiler"
    except ImportError as exc:
        return None, str(exc)


module, missing_because = _load()
