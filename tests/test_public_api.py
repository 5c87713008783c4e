"""The public surface, and which way the package's layers import."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hicache_sched

CLASSES = (
    "TransferScheduler SchedulerConfig LoadOp PoolTransfer LoadHandle LoadAck AckStatus SchedulerStats BurstBackend"
)
ERRORS = (
    "HiCacheSchedError InvalidLoadError LoadFailedError LoadCancelledError TransferTimeoutError SchedulerClosedError "
    "DeviceLostError"
)
NAMES = [*CLASSES.split(), *ERRORS.split()]

PACKAGE = Path(hicache_sched.__file__).parent


# -- names ----------------------------------------------------------------------------------------------------------


def test_every_public_name_is_there_and_no_other() -> None:
    assert sorted(hicache_sched.__all__) == sorted(NAMES)
    assert [name for name in NAMES if not hasattr(hicache_sched, name)] == []


def test_every_error_is_the_packages_and_what_it_stands_in_for() -> None:
    assert all(issubclass(getattr(hicache_sched, name), hicache_sched.HiCacheSchedError) for name in ERRORS.split())
    assert issubclass(hicache_sched.TransferTimeoutError, TimeoutError)
    assert issubclass(hicache_sched.InvalidLoadError, ValueError)


@pytest.mark.parametrize(("owner", "members"), [
    (hicache_sched.TransferScheduler, """
        start close reset aclose areset __enter__ __exit__ __aenter__ __aexit__
        load start_loading start_loading_sync pop_acks stats idle last_error handle_for listen unlisten
    """),
    (hicache_sched.LoadHandle, """
        slot generation burst_id node_ids num_tokens num_layers __await__ result enqueued layer layers wait_layer
        stale layer_enqueued layer_landed done exception add_done_callback cancel
    """),
    (hicache_sched.BurstBackend, "num_layers pool_names bind prepare enqueue_layer finish"),
])  # fmt: skip
def test_the_members_of_the_contract_are_there(owner: type, members: str) -> None:
    assert [name for name in members.split() if not hasattr(owner, name)] == []


def test_a_load_ack_has_the_fields_of_the_contract() -> None:
    assert [field.name for field in dataclasses.fields(hicache_sched.LoadAck)] == [
        "burst_id",
        "slot",
        "generation",
        "status",
        "node_ids",
        "num_tokens",
        "num_tokens_by_pool",
        "num_bytes",
        "duration_ms",
        "error",
    ]


@pytest.mark.parametrize("name", ["LoadOp", "PoolTransfer", "LoadAck", "SchedulerStats", "SchedulerConfig"])
def test_values_are_frozen(name: str) -> None:
    assert getattr(hicache_sched, name).__dataclass_params__.frozen


def undocumented() -> Iterator[str]:
    for name in NAMES:
        owner = getattr(hicache_sched, name)
        if not owner.__doc__:
            yield name
        for member, value in vars(owner).items():
            documentable = inspect.isroutine(value) or isinstance(value, property | classmethod)
            if member.startswith("_") or not documentable or inspect.getdoc(getattr(owner, member)):
                continue
            # Attributes of the protocol and of dataclasses are described in the docstring of the class.
            if f"{member}:" not in (inspect.getdoc(owner) or ""):
                yield f"{name}.{member}"


def test_every_public_class_and_method_has_a_docstring() -> None:
    assert list(undocumented()) == []


def test_the_package_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


# -- imports --------------------------------------------------------------------------------------------------------


def test_importing_it_brings_in_nothing_but_its_dependencies_and_starts_no_thread() -> None:
    script = """
import sys, threading
import torch, uvloop, structlog, numpy
before = {name.partition(".")[0] for name in sys.modules}
import hicache_sched
import hicache_sched.copy, hicache_sched.pools, hicache_sched.device
after = {name.partition(".")[0] for name in sys.modules}
print(sorted(after - before - sys.stdlib_module_names), threading.active_count())
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.split("\n")[0] == "['hicache_sched'] 1"


def modules() -> dict[str, Path]:
    """Every module of the package, by its dotted name without the package's."""
    paths = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in paths.items()}


def imports_of(path: Path) -> set[str]:
    """Modules of the package that a module imports when it is imported, types apart."""
    tree = ast.parse(path.read_text())
    for_types_only = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if node in for_types_only:
            continue
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "the package imports by full names"
            found.add(node.module or "")
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {name.removeprefix("hicache_sched.") for name in found if name.startswith("hicache_sched.")}


LAYERS = ["words", "device", "pools", "copy", "scheduler", "package", "integrations"]
"""From the bottom to the top: what every layer may talk about, folders, everything else, the package's own names, and
what is made with those."""

LAYER_OF = {"errors": "words", "load_op": "words", "log": "words", "__init__": "package"}
LAYER_OF |= {folder: folder for folder in ("device", "pools", "copy", "integrations")}
LAYER_OF |= {"bench": "integrations", "metrics": "integrations", "__main__": "integrations"}


def layer_of(module: str) -> str:
    return LAYER_OF.get(module.partition(".")[0], "scheduler")


def test_layers_import_downwards_only() -> None:
    upwards = [
        f"{module} ({layer_of(module)}) imports {imported} ({layer_of(imported)})"
        for module, path in modules().items()
        for imported in imports_of(path)
        if LAYERS.index(layer_of(imported)) > LAYERS.index(layer_of(module))
    ]
    assert upwards == []
    assert {"device", "pools", "copy", "scheduler"} <= {layer_of(module) for module in modules()}


def test_no_module_imports_itself_in_a_circle() -> None:
    imports = {module: imports_of(path) & modules().keys() for module, path in modules().items()}
    done: set[str] = set()
    while ready := {module for module in imports.keys() - done if imports[module] <= done}:
        done |= ready
    assert imports.keys() - done == set(), "these import each other"


def test_only_the_package_itself_imports_the_scheduler() -> None:
    assert [module for module, path in modules().items() if "scheduler" in imports_of(path)] == ["__init__"]
