"""The snippets of a page run as they stand, one after the other."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import quick

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SNIPPET = re.compile(r'```(python|sh)(?: title="([^"]+)")?\n(.*?)```', re.S)


def run_page(name: str, expected: int) -> dict[str, Any]:
    """What the snippets of a page define. One with a title is a file; `sh` runs in the current folder."""
    snippets = SNIPPET.findall((DOCS / name).read_text())
    assert len(snippets) == expected
    names: dict[str, Any] = {"__name__": "page"}
    for language, title, snippet in snippets:
        if title:
            Path(title).write_text(snippet)
        elif language == "python":
            exec(compile(snippet, name, "exec"), names)
        else:
            run_shell(snippet)
    return names


def run_shell(commands: str) -> None:
    """As a user's shell does, by these sources."""
    modules = {"python": "", "meshfeed": "-m meshfeed", "torchrun": "-m torch.distributed.run"}
    ours = "\n".join(f'{name}() {{ "{quick.python()}" {module} "$@"; }}' for name, module in modules.items())
    ran = subprocess.run(
        ["sh", "-e", "-c", f"{ours}\n{commands}"],
        env=os.environ | {"PYTHON_EXEC": quick.python(), "OMP_NUM_THREADS": "1"},  # the former is torchrun's
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert ran.returncode == 0, f"{commands}\n{ran.stdout}\n{ran.stderr}"
