"""python -m meshfeed"""

import sys

from meshfeed.cli.main import main

sys.exit(main())
