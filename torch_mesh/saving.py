"""What transformers asks a model about its quantisation: whether a patched model can be saved, trained and compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer

from .dense import packed_linears
from .errors import MeshError
from .families import find_experts
from .modules import patched_modules, unpacked_parameters


class PatchedModelQuantizer(HfQuantizer):
    """The ``hf_quantizer`` of a patched model."""

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # hidden states and routing weights have gradients; the experts are frozen

    @property
    def is_compileable(self) -> bool:
        return True

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, torch.Tensor] | None, dict]:
        """What save_pretrained writes: the very checkpoint that the model would be without torch_mesh, or an error.

        Holds all experts in memory at once.
        """
        if getattr(model, "_hf_peft_config_loaded", False):
            return None, {}  # only adapters are saved
        linears = dict(packed_linears(model))
        experts_exact = all(module._mesh_pool.exact for module in patched_modules(model))
        if not experts_exact or not all(linear.exact for linear in linears.values()):
            raise MeshError(
                "save_pretrained cannot write this model: its weights are rounded and the originals are not in memory. "
                "For a folder that opens with these experts as they are, run `torch-mesh convert SRC DST` on the original "
                "checkpoint; to save rounded weights as an ordinary checkpoint, torch_mesh.unpatch(model, lossy=True) first."
            )
        state = model.state_dict()
        for layer in find_experts(model):
            for name, tensor in unpacked_parameters(layer, torch.device("cpu")).items():
                state[f"{layer.path}.{name}"] = tensor
        state.update({f"{path}.weight": linear.unpacked_weight() for path, linear in linears.items()})
        return state, {}


def attach_quantizer(model: nn.Module, quantizer: PatchedModelQuantizer) -> None:
    """Puts ``quantizer`` between ``model``, and the models inside it, and save_pretrained."""
    for module in _pretrained_models(model):
        module.hf_quantizer = quantizer


def detach_quantizer(model: nn.Module) -> None:
    for module in _pretrained_models(model):
        if isinstance(vars(module).get("hf_quantizer"), PatchedModelQuantizer):
            del module.hf_quantizer


def _pretrained_models(model: nn.Module) -> list[Any]:
    """The transformers models in ``model`` that hold patched experts."""
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return [module for module in models if next(patched_modules(module), None) is not None]
