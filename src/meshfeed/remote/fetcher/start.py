"""Script, started by path: `python start.py DESCRIPTOR READER` becomes a fetcher; see `process`.

READER is for people who list processes. The package's own `__init__` would import torch, which a fetcher does
not need; an empty module replaces it.
"""

import os
import sys
from pathlib import Path
from types import ModuleType

if __name__ == "__main__":
    if os.fork():  # the reader need not collect it as a child
        os._exit(0)
    os.setsid()  # Ctrl-C goes to the reader alone, whose end ends the fetcher
    here = Path(__file__).resolve().parent
    # so that no module here hides one of another package
    sys.path[:] = [each for each in sys.path if Path(each).resolve() != here]
    package = ModuleType("meshfeed")
    package.__path__ = [str(here.parents[1])]
    sys.modules["meshfeed"] = package
    from meshfeed.remote.fetcher.process import main

    main(int(sys.argv[1]))
