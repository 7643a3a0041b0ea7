"""Record the routing of a model's forwards as a trace."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from torch_mesh.errors import MeshError
from torch_mesh.models.families import check_recordable, find_experts, find_router, ranking, router_unsupported_reason
from torch_mesh.prefetch.predictor import fitted_routers, load_predictor
from torch_mesh.routing.traces import Trace, save_trace
from torch_mesh.system.atomic_files import check_new_file

_recorded: list[nn.Module] = []  # models in a ``record_trace``


def is_recorded(model: nn.Module) -> bool:
    """Whether a ``record_trace`` of ``model``, of a part of it or of a module around it is open. Rejected drafts would
    count as its tokens."""
    return any(part is model for each in _recorded for part in each.modules()) or any(
        part is each for each in _recorded for part in model.modules()
    )


@contextmanager
def record_trace(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    scores: bool = False,
    lookahead: bool = False,
    predictor: str | os.PathLike[str] | None = None,
) -> Iterator[None]:
    """Record the routing of every forward of ``model`` within the block, and write it to ``path`` (.npz) at its end.

    ``scores`` adds the probabilities of all experts, ``lookahead`` those of each layer's router on the hidden states
    one layer before; ``predictor``, a file of ``torch-mesh routing fit``, replaces the latter, with the first layer's
    predicted by the last one a token earlier. A forward of more than one token begins a new sequence, and one that
    raises is left out. Works for patched and unpatched models. Decode without drafts, since rejected ones would be
    recorded: a model with ``MeshConfig.speculation`` does so meanwhile, and ``torch_mesh.speculate`` raises ValueError.

    Raises OSError before the block if no file can be made at ``path``, ValueError for a batch of several sequences, and
    MeshError if no forward ended without an error. Nothing is written then, nor if the block raises.
    """
    check_new_file(path)
    recorder = _Recorder(model, scores, lookahead, predictor)
    handles = recorder.install()
    _recorded.append(model)
    try:
        yield
    finally:
        _recorded.remove(model)
        for handle in handles:
            handle.remove()
    save_trace(recorder.trace(Path(path).stem), path)


_Scorer = tuple[torch.Tensor, "torch.Tensor | None", str]  # weight, bias and scoring of a router


def _scorer(router: Any, corrected: bool) -> _Scorer | None:
    """``corrected``: with a bias that affects selection only, not the weights of the selected."""
    if router is None:
        return None
    return router.weight, router.bias if corrected or router.scoring == "logits" else None, router.scoring


class _Recorder:
    def __init__(
        self, model: nn.Module, scores: bool, lookahead: bool, predictor: str | os.PathLike[str] | None
    ) -> None:
        self.model = model
        self.layers = find_experts(model)
        check_recordable(self.layers)
        by_router = scores or (lookahead and predictor is None)
        routers: list[Any] = [find_router(model, layer) if by_router else None for layer in self.layers]
        if by_router and None in routers:
            unranked = self.layers[routers.index(None)]
            raise MeshError(
                f"No matrix ranks the experts of {unranked.path}: {router_unsupported_reason(model, unranked)}. Record "
                "without scores and lookahead."
            )
        predictors = [None, *routers[1:]]
        if predictor is not None:
            fitted = load_predictor(predictor, self.layers)
            fitted.check_model(model, self.layers, predictor)
            predictors = [*fitted_routers(model, self.layers, fitted.weights)]
        # Weights instead of modules, which may be hooked.
        self.routers = [_scorer(router, corrected=False) for router in routers]
        self.predictors = [_scorer(router, corrected=True) for router in predictors]
        self.with_scores, self.with_lookahead = scores, lookahead or predictor is not None
        self.experts = max(layer.routed_experts for layer in self.layers)
        self.starts: list[int] = []
        self.forwards: list[int] = []
        self.tokens = 0
        self.ids: list[list[npt.NDArray[Any]]] = [[] for _ in self.layers]
        self.scores: list[list[npt.NDArray[Any]]] = [[] for _ in self.layers]
        self.lookahead: list[list[npt.NDArray[Any]]] = [[] for _ in self.layers]
        self.recorded: list[list[Any]] = [self.starts, self.forwards, *self.ids, *self.scores, *self.lookahead]
        self.end()

    def install(self) -> list[Any]:
        def begin(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            self.drop_unfinished()
            given = named.get("input_ids", arguments[0] if arguments else None)
            given = named.get("inputs_embeds") if given is None else given
            if isinstance(given, torch.Tensor) and given.size(0) != 1:
                raise ValueError(f"a trace holds one sequence at a time; got a batch of {given.size(0)}")
            count = given.size(1) if isinstance(given, torch.Tensor) else 1
            if count > 1 or not self.starts:
                self.starts.append(self.tokens)
            self.forwards.append(self.tokens)
            self.tokens += count

        def layer_hook(index: int) -> Any:
            def hook(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
                given = [*arguments, *named.values()]
                self.record(index, given[0], given[1])

            return hook

        handles: list[Any] = []
        # generate of a PeftModel calls the base model. Where both are called, the inner forward replaces the outer one.
        base = getattr(self.model, "get_base_model", lambda: self.model)()
        for module in dict.fromkeys((self.model, base)):
            handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
            handles.append(module.register_forward_hook(self.end))  # not called after an error
        for index, layer in enumerate(self.layers):
            experts: Any = layer.module
            handles.append(experts.register_forward_pre_hook(layer_hook(index), with_kwargs=True))
        return handles

    def end(self, *_: Any) -> None:
        self.finished = self.tokens, [len(each) for each in self.recorded]

    def drop_unfinished(self) -> None:
        """Drop what a forward that failed has recorded."""
        self.tokens, lengths = self.finished
        for each, length in zip(self.recorded, lengths, strict=True):
            del each[length:]

    @torch.no_grad()
    def record(self, index: int, hidden: torch.Tensor, ids: torch.Tensor) -> None:
        self.ids[index].append(ids.cpu().numpy())
        if self.with_scores:
            self.scores[index].append(self.probabilities(self.routers[index], hidden))
        if self.with_lookahead:
            following = (index + 1) % len(self.layers)
            self.lookahead[following].append(self.probabilities(self.predictors[following], hidden))

    def probabilities(self, router: _Scorer | None, hidden: torch.Tensor) -> npt.NDArray[Any]:
        """[tokens, experts]; 0 without a router."""
        if router is None:
            return np.zeros((hidden.size(0), self.experts), np.float16)
        return torch.softmax(ranking(hidden, *router), -1).half().cpu().numpy()

    def trace(self, name: str) -> Trace:
        self.drop_unfinished()
        if self.tokens == 0 or not self.ids[0]:
            raise MeshError("No forward ended without an error while the trace was recorded: nothing to write.")

        def stacked(parts: list[list[npt.NDArray[Any]]]) -> npt.NDArray[Any]:
            return np.stack([np.concatenate(layer) for layer in parts], axis=1)

        lookahead = stacked(self.lookahead) if self.with_lookahead else None
        if lookahead is not None:  # the first layer's were predicted a token earlier
            lookahead[1:, 0] = lookahead[:-1, 0].copy()
            lookahead[self.starts, 0] = 0
        return Trace(
            name,
            stacked(self.ids).astype(np.int32),
            np.array([*self.starts, self.tokens], np.int64),
            self.experts,
            stacked(self.scores) if self.with_scores else None,
            lookahead,
            np.array(self.forwards, np.int64),
        )
