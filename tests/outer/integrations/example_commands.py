"""Runs the commands that an example's docstring shows, one after the other, in one process.

example_commands.py EXAMPLE CORPUS OUT
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import sys

import loops

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""What torchrun would tell."""


def commands_of(doc: str, corpus: str, out: str) -> list[list[str]]:
    """What follows the script's name, for one rank, few tokens and four steps."""
    shown = [shlex.split(line) for line in doc.splitlines() if line.strip().startswith("torchrun ")]
    given = {"PREFIX": corpus, "DIR": out, "PATH": f"{out}/step-2"}
    made = [[given.get(word, word) for word in words[4:]] for words in shown]
    return [
        [
            *re.sub(r"--(tp|cp|pp|vpp|batch) \d+ ?", "", shlex.join(each)).split(),
            "--steps",
            "4",
            "--vocab",
            str(loops.VOCAB),
        ]
        for each in made
    ]


def main() -> None:
    name, corpus, out = sys.argv[1:]
    example = importlib.import_module(name)
    commands = commands_of(example.__doc__ or "", corpus, out)
    for command in commands:
        loops.forget_accelerate()
        os.environ |= ALONE  # which Lightning takes away at its end
        sys.argv = [name, *command]
        example.main()
    print(f"{len(commands)} commands")


if __name__ == "__main__":
    main()
