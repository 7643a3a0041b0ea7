"""``MeshConfig.speculation``: a model whose own ``generate`` speculates."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torch_mesh.errors import UnsupportedModelError
from torch_mesh.modules.experts import change_class, mixed_class
from torch_mesh.speculation.decoding import Speculation, speculate, unsupported_reason
from torch_mesh.speculation.linear_attention import uninstall_linear_attention
from torch_mesh.speculation.suitability import standalone_unsupported_reason


class SpeculatingModel(nn.Module):
    """Mixed into the class of a generating model: greedy search and sampling of up to four texts speculate.

    ``generate`` looks up its decoding methods in the model's class, and calls them with prepared arguments.
    """

    _mesh_speculation: Speculation

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        arguments: Any = (input_ids, logits_processor, stopping_criteria, generation_config)
        if generation_config.is_assistant or unsupported_reason(
            self, input_ids, generation_config, synced_gpus, model_kwargs
        ):
            theirs: Any = super()
            return theirs._sample(*arguments, synced_gpus=synced_gpus, streamer=streamer, **model_kwargs)
        return self._mesh_speculation.decode(self, *arguments, streamer=streamer, **model_kwargs)

    def extra_repr(self) -> str:
        return ", ".join(filter(None, [super().extra_repr(), "speculation=lookup"]))


def check_speculation(model: nn.Module, speculation: str) -> None:
    """Raises UnsupportedModelError if ``speculation`` is on and ``model`` does not support it."""
    if speculation == "off":
        return
    name = type(model).__name__
    if reason := standalone_unsupported_reason(model):
        raise UnsupportedModelError(
            f"speculation={speculation!r} is unsupported for {name}: {reason}. Set speculation to 'off'."
        )


def install_speculation(model: nn.Module, speculation: str) -> None:
    """Let ``model.generate`` speculate, unless ``speculation`` is off."""
    if speculation != "off":
        change_class(model, mixed_class(SpeculatingModel, type(model), keeps_name=True))
        vars(model)["_mesh_speculation"] = speculate()


def uninstall_speculation(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, SpeculatingModel):
            change_class(module, type(module).__bases__[1])
            vars(module).pop("_mesh_speculation", None)
    uninstall_linear_attention(model)
