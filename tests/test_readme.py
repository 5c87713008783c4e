"""The README's example runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_usage_example_runs_and_prints_each_layer_and_an_ok_ack(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(example)
    run = subprocess.run(
        [sys.executable, script],
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert [f"layer {layer} has landed" in run.stdout for layer in range(4)] == [True] * 4
    assert "status=<AckStatus.OK: 'ok'>" in run.stdout
