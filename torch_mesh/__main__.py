"""``python -m torch_mesh``: the command ``torch-mesh``, where its script is not on the path."""

import sys

from torch_mesh.cli import main

sys.exit(main())
