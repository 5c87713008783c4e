"""The command line: `python -m hicache_sched`."""

from __future__ import annotations

import logging
import sys

import structlog


def main() -> None:
    try:
        import typer

        from hicache_sched.bench.cli import app as bench
    except ModuleNotFoundError as exc:
        if exc.name not in ("rich", "typer"):
            raise
        sys.exit(f"{exc.name} is not installed: pip install 'hicache-sched[bench]'")
    # An application configures the package's logs, and this is one.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    app = typer.Typer(no_args_is_help=True, add_completion=False, help="Transfers for hierarchical KV caches.")
    app.add_typer(bench, name="bench")
    app.callback()(lambda: None)
    app(prog_name="python -m hicache_sched")


if __name__ == "__main__":
    main()
