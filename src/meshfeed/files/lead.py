"""Started by path, as a process of its own: `python lead.py FOLDER` becomes the leader of a cache folder.

The package's own `__init__` would bring torch, which a leader has no use for; an empty one stands in for it.
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
