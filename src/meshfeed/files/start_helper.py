"""Script, started by path: `python start_helper.py DESCRIPTOR READER` becomes a helper; see `helper`.

READER is only for whoever lists processes. The package's own `__init__` would import torch, which a helper
does not need; an empty module replaces it.
"""

import os
import sys
from pathlib import Path
from types import ModuleType

if __name__ == "__main__":
    if os.fork():  # the reader need not collect it as a child
        os._exit(0)
    os.setsid()  # Ctrl-C is for the reader, and so ends both
    package = ModuleType("meshfeed")
    package.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["meshfeed"] = package
    from meshfeed.files.helper import main

    main(int(sys.argv[1]))
