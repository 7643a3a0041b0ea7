"""Multi-token prediction heads of a checkpoint: ``generate(use_mtp=True)`` of patched models.

transformers builds these heads anew in every ``generate``. Here they are built once, and their experts go into a pool
of their own in 8 bits (docs/decisions/0056). transformers drafts and verifies; the controller decides when.
"""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation import GenerationMixin
from transformers.utils import ContextManagers

from torch_mesh.errors import MeshError, UnsupportedModelError
from torch_mesh.hf.generation_compat import GET_CANDIDATE_GENERATOR, MtpCache, MtpCandidateGenerator, MtpModel
from torch_mesh.hf.parallelism_checks import divided_sizes
from torch_mesh.hf.wrapping import wrap
from torch_mesh.models.families import has_experts
from torch_mesh.modules.experts import patched_modules
from torch_mesh.speculation.controller import Controller
from torch_mesh.system.memory import shortage

_KEPT, _PATCH_HEADS = "_mesh_mtp", "_mesh_patch_heads"  # attributes of a model
_lock = threading.Lock()
clock = time.perf_counter


# Packs the experts of heads into a pool in 8 bits, with the given resident fraction and number of threads.
PatchHeads = Callable[[nn.Module, float, "str | int"], None]


class KeptHeads(MtpCandidateGenerator):
    """transformers' generator with given heads, and without drafts while ``controller`` wants none."""

    full_seq_last_hidden_states: Any  # set by the base class, with several heads

    def __init__(
        self, model: Any, heads: Any, controller: Controller, generation_config: Any, logits_processor: Any
    ) -> None:
        self.num_mtp_layers = heads.num_mtp_layers
        self.model_kwargs_overrides = {"output_hidden_states": -1}  # hidden states of the last layer only
        self.device = _device(model)
        self.mtp_model = heads
        self.mtp_cache = MtpCache(config=model.config.get_mtp_config())
        self.mtp_cache.activate_past_recording()
        self.do_sample = generation_config.do_sample
        self.logits_processor = logits_processor
        self.is_main_model_prefill = True
        self._controller = controller
        self._unseen: list[Tensor] = []  # hidden states of tokens that came without drafting
        self._drafted = 0  # tokens drafted for the next forward
        self._began: float | None = None  # start of drafting; None: not timed
        controller.begin()

    def get_candidates(
        self,
        input_ids: Any,
        model_kwargs: dict[str, Any],
        model_outputs: Any,
        is_first_iteration: bool,
        n_last_matches: int,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        self._began = None
        if is_first_iteration:  # its forward computes the hidden states of the prompt
            return input_ids, None
        began = clock()
        hidden = model_outputs.hidden_states[-1]
        late = bool(self._unseen)
        # A prompt keeps all of its tokens. Later forwards keep the token before the draft and the accepted ones.
        kept = n_last_matches + 1 if late or not self.is_main_model_prefill else input_ids.shape[1] - 1
        rows = hidden[:, :kept].to(self.device)
        self._drafted = self._controller.choose(self.num_mtp_layers)
        if not self._drafted:
            if not late and not self.is_main_model_prefill:
                rows = self._rewind(rows)
            self._unseen.append(rows)
            self._began = began
            return input_ids, None
        if late:
            rows = torch.cat([*self._unseen, rows], dim=1)
            self._unseen.clear()
            model_outputs = types.SimpleNamespace(hidden_states=(rows,))
            n_last_matches = rows.shape[1] - 1
        else:
            self._began = began  # not when catching up, which is like a prompt and predicts no later draft's time
        candidates: tuple[Any, Any] = super().get_candidates(
            input_ids, model_kwargs, model_outputs, is_first_iteration, n_last_matches, **kwargs
        )
        return candidates

    def update_candidate_strategy(self, input_ids: Any, scores: Any, num_matches: int) -> None:
        if self._began is not None or self._drafted:
            seconds = None if self._began is None else clock() - self._began
            self._controller.observe(self._drafted, int(num_matches), seconds)

    def _rewind(self, rows: Tensor) -> Tensor:
        """After a draft: ``rows``, preceded by those of the drafted tokens in the heads' cache. These may have been
        wrong, and are cut from it."""
        if self.num_mtp_layers == 1:  # a single head caches no drafted tokens
            return rows
        count = min(self.num_mtp_layers, self.full_seq_last_hidden_states.shape[1])
        self.mtp_cache.crop(-count)
        known = self.full_seq_last_hidden_states
        self.full_seq_last_hidden_states = known[:, :-count]
        return torch.cat([known[:, -count:], rows], dim=1)


def install_mtp(model: nn.Module, patch_heads: PatchHeads) -> None:
    """Let ``generate(use_mtp=True)`` keep the heads of ``model``, if it has any, with their experts in a pool by
    ``patch_heads``."""
    if isinstance(model, GenerationMixin) and hasattr(model, "lm_head"):
        vars(model)[_PATCH_HEADS] = patch_heads


def uninstall_mtp(model: nn.Module) -> None:
    """Reverse ``install_mtp``, and free the kept heads."""
    for module in model.modules():
        vars(module).pop(_PATCH_HEADS, None)
        vars(module).pop(_KEPT, None)


def _candidate_generator(theirs: Any, self: Any, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
    patch_heads = vars(self).get(_PATCH_HEADS)
    if patch_heads is None or not _drafts_with_heads(self, generation_config):
        return theirs(self, generation_config, *args, **kwargs)
    if divided_sizes(self):
        raise UnsupportedModelError(
            f"generate(use_mtp=True): {type(self).__name__} is distributed among processes, whose clocks would "
            "draft different numbers of tokens. Leave use_mtp out."
        )
    return KeptHeads(self, *_heads(self, patch_heads), generation_config, kwargs["logits_processor"])


# Not an attribute of each model: a bound method there would keep the model alive.
wrap("transformers.generation.utils.GenerationMixin", GET_CANDIDATE_GENERATOR, _candidate_generator)


def _drafts_with_heads(model: Any, generation_config: Any) -> bool:
    other = generation_config.assistant_early_exit, generation_config.prompt_lookup_num_tokens
    wanted = generation_config.use_mtp and all(each is None for each in other)
    return bool(wanted and getattr(model.config.get_text_config(), "num_mtp_layers", None))


def _device(model: Any) -> Any:
    """The heads' device in transformers: that of the last layer."""
    return next(parameter.device for parameter in model.get_decoder().layers[-1].parameters())


def _dtype(model: Any) -> Any:
    """The dtype of hidden states. ``config.dtype``, which transformers uses, is outdated after a cast."""
    return model.get_input_embeddings().weight.dtype


def _heads(model: Any, patch_heads: PatchHeads) -> tuple[Any, Controller]:
    """The heads of ``model`` and their controller: the kept ones, unless the model was cast, moved or renamed since."""
    made_for = (model.config.name_or_path, _dtype(model), _device(model))
    with _lock:
        kept = vars(model).get(_KEPT)
        if kept is None or kept[0] != made_for:
            vars(model).pop(_KEPT, None)  # before new ones take memory
            heads = _make(model, patch_heads)
            kept = vars(model)[_KEPT] = (made_for, heads, Controller([heads.num_mtp_layers]))
        _, heads, controller = kept
        heads.tie_with_main_model(model)  # its embedding or head may have been replaced
    return heads, controller


def _make(model: Any, patch_heads: PatchHeads) -> Any:
    _check_memory(model)
    heads = MtpModel.from_pretrained(model, device_map={"": _device(model)})
    heads.layers.to(_dtype(model))
    pool = next(patched_modules(model))._mesh_pool
    if has_experts(heads.layers):  # the same resident fraction as in the model
        fraction = 1.0 if pool.in_memory else min(pool.slots / (pool.layers * pool.geometry.num_experts), 1.0)
        patch_heads(heads.layers, fraction, pool.threads or "auto")
    return heads


def _check_memory(model: Any) -> None:
    """Raises MeshError if the heads, which are unpacked at first, do not fit in memory."""
    with ContextManagers(MtpModel.get_init_context(model.config.dtype, False, False, None)):
        outline = MtpModel(model, model.config.get_text_config().num_mtp_layers)
    needed = sum(parameter.nbytes for parameter in outline.layers.parameters())
    if (free := shortage(needed)) is not None:
        raise MeshError(
            f"use_mtp=True: the MTP layers of {type(model).__name__} take {needed:,} bytes until their experts are "
            f"packed, and {free:,} are free. Free some, or leave use_mtp out: speculation='lookup' drafts without "
            "such layers."
        )
