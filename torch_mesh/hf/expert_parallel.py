"""Expert parallelism: each rank has a range of each layer's experts in its own pool, behind transformers' dispatch.

Of transformers' two rules for experts, ``grouped_gemm`` is implemented here and ``ep_dispatch_experts`` kept:
docs/decisions/0055.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from torch_mesh.errors import LostRankError, MeshError, UnsupportedModelError
from torch_mesh.hf.compat import EXPERT_PARALLEL, is_hooked, keep_ep_rules, unhook
from torch_mesh.hf.parallelism_checks import dispatches
from torch_mesh.hf.torch_compat import after_backward, is_in_backward, pytree
from torch_mesh.models.expert_range import EXPERT_RANGE, OPENING, ExpertRange
from torch_mesh.models.families import ExpertsLayer, unpooled_layers
from torch_mesh.system.collectives import gathered, lost_ranks, this_machine, this_rank

_DISPATCH = "EpDispatchExpertsParallel.install_forward.<locals>"  # transformers' wrapper of a forward
_ADAPTERS = "_mesh_adapters"  # attribute of an experts module, while its dispatch runs
_OWN_EXPERTS = "deepgemm_megamoe"  # the one dispatch that does not call the module's forward


def expert_range_of(ranks: int, layers: Sequence[ExpertsLayer]) -> ExpertRange:
    """The experts of this rank. A collective call."""
    machines = gathered(this_machine(), OPENING)
    # check_divisible only accepts groups of all ranks of the job.
    return ExpertRange(torch.distributed.get_rank(), ranks, layers[0].num_experts, machines.count(this_machine()))


def check_divisible(
    model: nn.Module,
    layers: Sequence[ExpertsLayer],
    ranks: int,
    *,
    gpu_experts: object,
    lossy_modes: str,
    speculation: str,
) -> None:
    """Raises UnsupportedModelError for settings that expert parallelism over ``ranks`` excludes."""
    experts = layers[0].num_experts
    named: list[str] = []
    if experts % ranks:
        named.append(f"{experts} experts cannot be divided evenly among {ranks} ranks")
    if others := unpooled_layers(model):
        named.append(f"{others[0].path} has experts of another shape than {layers[0].path}, and a pool holds one shape")
    if any(not hasattr(layer.module, EXPERT_PARALLEL) for layer in layers):
        named.append(f"{type(layers[0].module).__name__} knows no expert parallelism in transformers")
    if _OWN_EXPERTS in dispatches(model):
        named.append(f"ep_implementation={_OWN_EXPERTS!r} computes experts by a kernel of its own")
    if gpu_experts != 0:
        named.append("gpu.experts places experts of a whole model")
    if lossy_modes:
        named.append(f"lossy ({lossy_modes}) would decide on each rank by what that rank has in memory")
    if speculation != "off":
        named.append(
            "speculation drafts by each rank's own clock, and ranks must agree on how many tokens a forward has"
        )
    if named:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be opened with ep_size={ranks}: {'; '.join(named)}. Change that, or open "
            "the model without distributed_config."
        )


def divide(model: Any, layers: Sequence[ExpertsLayer], expert_range: ExpertRange) -> list[ExpertsLayer]:
    """Do what ``grouped_gemm`` would do for loaded experts: give each module this rank's parameters and number of
    experts, on the meta device. Removes the plan's rules that would find no parameters."""
    for layer in layers:
        module: Any = layer.module
        for name, parameter in layer.parameters.items():
            own = torch.empty((expert_range.count, *parameter.shape[1:]), dtype=parameter.dtype, device="meta")
            module._parameters[name] = nn.Parameter(own, requires_grad=parameter.requires_grad)
        module.num_experts = expert_range.count
        vars(module).update({EXPERT_PARALLEL: True, EXPERT_RANGE: expert_range})
    of_experts = tuple(f"{layer.kind}." for layer in layers)
    keep_ep_rules(model, lambda name: not name.startswith(of_experts))
    return [dataclasses.replace(layer, num_experts=expert_range.count, expert_range=expert_range) for layer in layers]


class LateForward:
    """A module's forward as of the time of the call: transformers' wrapper keeps the forward that it finds, but the
    module's class changes later. Passes the ``adapters`` of ``past_dispatch``, which the wrapper drops."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        vars(module)["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        adapters = vars(self._module).get(_ADAPTERS)
        if adapters:
            kwargs["adapters"] = adapters
        return type(self._module).forward(self._module, *args, **kwargs)

    @staticmethod
    def remove(module: nn.Module) -> None:
        """Remove it from a module that was not wrapped."""
        if isinstance(vars(module).get("forward"), LateForward):
            del module.forward


def past_dispatch(experts: nn.Module, adapters: Any, *inputs: Any) -> Any:
    """``experts(*inputs)`` with ``adapters``, in an attribute: forwards with collectives never overlap."""
    vars(experts)[_ADAPTERS] = adapters
    try:
        return experts(*inputs)
    finally:
        del vars(experts)[_ADAPTERS]


def prepare_forwards(model: nn.Module, layers: Sequence[ExpertsLayer]) -> None:
    """Install late forwards for experts and linear layers, before transformers wraps them."""
    modules = [layer.module for layer in layers]
    for module in (*modules, *(module for module in model.modules() if type(module) is nn.Linear)):
        LateForward(module)


def finish_forwards(model: nn.Module, layers: Sequence[ExpertsLayer], undivided: Iterable[nn.Module]) -> None:
    """Check the dispatch after transformers' wrapping, and make every collective of the model fail with
    ``LostRankError``. ``undivided``: modules with all of their weights on each rank, whatever rule the plan has."""
    for module in model.modules():
        LateForward.remove(module)
    for module in undivided:
        unhook(module)
    for layer in layers:
        forward = vars(layer.module).get("forward")
        if not getattr(forward, "__qualname__", "").startswith(_DISPATCH):
            raise UnsupportedModelError(
                f"No rule of ep_plan dispatches tokens to {layer.path}, which has {layer.expert_range}. Leave "
                f"ep_plan out, or add {{{layer.kind!r}: 'ep_dispatch_experts'}} to it."
            )
    forwards = _Forwards(this_rank())
    for path, module in model.named_modules():
        forward = vars(module).get("forward")
        if forward is not None and is_hooked(module):
            vars(module)["forward"] = _Watched(forward, path, forwards)
            vars(module)["__deepcopy__"] = functools.partial(_refuse_copy, path)
    vars(model)["forward"] = _WatchedModel(model.forward, forwards)
    vars(model)["__deepcopy__"] = functools.partial(_refuse_copy, type(model).__name__)


def _refuse_copy(path: str, memo: object) -> NoReturn:
    raise MeshError(
        f"{path} is divided among ranks, and can neither be copied nor be among modules_to_save: transformers' wrapper "
        "of its forward would compute with the original. Open the model once more instead."
    )


class _Forwards:
    """The state of a divided model's forwards on this rank."""

    def __init__(self, rank: str) -> None:
        self._rank = rank
        self.begun = False  # the model's forward has reached a collective
        # A forward ended early: the next collective would meet a different one of other ranks.
        self.failed = False
        self.in_backward = False  # from the first gradient of the model's output to the end without an error
        self.count = 0  # successful forwards of the model
        self.compared = 0  # the last forward with compared inputs

    def check(self) -> None:
        if self.failed:
            raise LostRankError(
                f"{self._rank}: an earlier forward or backward of this rank failed, and other ranks may wait within "
                "it. End all ranks and restart them."
            )

    def watch_backward(self, output: Any) -> None:
        for tensor in pytree.tree_leaves(output):
            # A leaf is an input, such as trained embeddings as hidden_states[0]: hooks on it would accumulate.
            if torch.is_tensor(tensor) and tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(self._begin_backward)

    def _begin_backward(self, _: torch.Tensor) -> None:
        self.in_backward = True
        after_backward(self._end_backward)

    def _end_backward(self) -> None:
        self.in_backward = False


class _Watched:
    """Wraps a forward with collectives."""

    def __init__(self, forward: Callable[..., Any], path: str, forwards: _Forwards) -> None:
        self._forward = forward
        self._path = path
        self._forwards = forwards

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._forwards.check()
        self._forwards.begun = True
        # torch's checkpointing ends a repeated forward by an exception of another type.
        try:
            with lost_ranks(self._path):
                return self._forward(*args, **kwargs)
        except (RuntimeError, ValueError, MemoryError, MeshError, KeyboardInterrupt):
            self._forwards.failed = True
            raise


class _WatchedModel:
    """Wraps the forward of the whole model, since a failure between collectives leaves other ranks waiting in the
    next one."""

    def __init__(self, forward: Callable[..., Any], forwards: _Forwards) -> None:
        self.__wrapped__ = forward  # for signature lookups
        self._forwards = forwards

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forwards = self._forwards
        forwards.check()
        if torch.compiler.is_compiling():  # a graph would be specialized to one count
            return self.__wrapped__(*args, **kwargs)
        # With checkpointing of the whole model this is a part of the backward.
        forwards.failed |= forwards.in_backward and not is_in_backward()
        forwards.check()
        forwards.begun = False
        try:
            # Compare in forwards 1, 2, 4, 8 and each sixteenth, which costs a thousandth.
            this = forwards.count + 1
            if (this.bit_count() == 1 or this % 16 == 0) and forwards.compared < this:
                own = _summary(args[0] if args else kwargs.get("input_ids"))
                forwards.begun = True
                summaries = gathered(own, "the comparison of inputs")
                forwards.begun = False
                _check_same_inputs(summaries)
                forwards.compared = this
            output = self.__wrapped__(*args, **kwargs)
        except BaseException:
            forwards.failed |= forwards.begun
            raise
        forwards.count += 1
        forwards.watch_backward(output)
        return output


def _summary(ids: Any) -> tuple[list[int], int] | None:
    """A digest of a rank's tokens, for comparing ranks."""
    if not torch.is_tensor(ids):
        return None
    values = ids.detach().cpu().contiguous().reshape(-1).view(torch.uint8)  # numpy has no bf16
    return list(ids.shape), zlib.crc32(values.numpy().tobytes())


def _check_same_inputs(summaries: Sequence[tuple[list[int], int] | None]) -> None:
    """Raises MeshError on all ranks for different inputs: sums over ranks would silently mix tokens."""
    for rank, other in enumerate(summaries):
        if other != summaries[0]:
            shapes = [each and each[0] for each in (summaries[0], other)]
            raise MeshError(
                f"Ranks 0 and {rank} got different input_ids ({shapes[0]} and {shapes[1]}). Give all ranks the same "
                "batch; where generate samples tokens, call torch.manual_seed with the same seed on each first."
            )
