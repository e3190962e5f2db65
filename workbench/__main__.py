"""``python -m workbench`` is the command ``workbench``."""

from __future__ import annotations

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the folder this was called from, whose `kernels` transformers would take for another package

from workbench.cli import main

sys.exit(main())
