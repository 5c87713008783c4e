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
    app.command()(doctor)
    app.callback()(lambda: None)
    app(prog_name="python -m hicache_sched")


def doctor() -> None:
    """What there is here, and what was asked for and is missing; the exit status is then 1."""
    from rich.console import Console
    from rich.table import Table

    from hicache_sched.doctor import examine

    findings = list(examine())
    table = Table(show_header=False)
    for finding in findings:
        table.add_row(finding.what, finding.found, style="red" if finding.is_missing else None)
    Console().print(table)
    sys.exit(any(finding.is_missing for finding in findings))


if __name__ == "__main__":
    main()
