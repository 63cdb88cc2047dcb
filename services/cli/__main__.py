"""`python -m services.cli` is the command `penstock`."""

import sys

from services.cli import main

sys.exit(main())
