"""Script, started by path: `python lead.py FOLDER` becomes the leader of a cache folder.

The package's own `__init__` would import torch, which a leader does not need; an empty module replaces it.
"""

import sys
from pathlib import Path
from types import ModuleType

if __name__ == "__main__":
    package = ModuleType("meshfeed")
    package.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["meshfeed"] = package
    from meshfeed.files.leader import main

    main(Path(sys.argv[1]))
