"""The committed stubs are what the contracts in proto/ compile to."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def stubs(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for package in ("stages", "serving", "trainer")
        for path in sorted((root / package).rglob("*_pb2*.py*"))
        if path.suffix in (".py", ".pyi")
    }


def test_stubs_match_the_contracts(tmp_path: Path) -> None:
    # -o: this interpreter's environment will do, whatever the state of .venv
    command = ["make", "-o", ".venv/.dev", "proto", f"BIN={Path(sys.executable).parent}", f"OUT={tmp_path}"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr

    fresh, committed = stubs(tmp_path), stubs(ROOT)
    different = sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))
    assert fresh
    assert not different, f"run make proto: {different} differ from what the contracts compile to"
