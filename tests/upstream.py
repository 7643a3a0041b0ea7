"""Skip marks for features that some releases of other packages lack, with or without torch_mesh."""

from __future__ import annotations

from dataclasses import fields
from importlib.metadata import version

import pytest
import transformers
from packaging.version import Version
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.models.jamba import modeling_jamba

loads_adapters = pytest.mark.skipif(
    Version(version("peft")) < Version(MIN_PEFT_VERSION),
    reason=f"transformers {transformers.__version__} takes adapters with PEFT {MIN_PEFT_VERSION} alone, and here is "
    f"{version('peft')}",
)
sees_with_llama4 = pytest.mark.skipif(
    transformers.__version__ == "5.24.0",
    reason="the Llama 4 of transformers 5.24.0 asks its text model for image_outputs, which that does not have",
)
# In transformers 5.17 Jamba's router is a linear layer, and the block selects the experts.
JAMBA_HAS_ROUTER = hasattr(modeling_jamba, "JambaTopKRouter")

needs_ep_size = pytest.mark.skipif(
    all(field.name != "ep_size" for field in fields(DistributedConfig)),
    reason="this transformers divides experts by another interface",
)
