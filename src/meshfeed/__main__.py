"""python -m meshfeed"""

import sys

from meshfeed.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
