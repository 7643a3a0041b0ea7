"""``python -m torch_mesh.cli``, where no script is installed."""

import sys

from . import main

sys.exit(main())
