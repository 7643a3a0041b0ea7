"""The public path of ``synthetic_trace``, which is in ``routing/synthetic.py``."""

from torch_mesh.routing.synthetic import synthetic_trace

__all__ = ["synthetic_trace"]
