"""What both sides of every benchmark share."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
BIN = Path(sys.executable).parent
# torchrun's better setting: without it most restarts never recover.
THEIR_ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# Both sides may keep their compiled modules, as an ordinary installation does.
ENVIRON = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
PATIENCE_S = float(os.environ.get("BENCH_PATIENCE_S", "90"))
