"""``torch-mesh routing fit``: fit a predictor to one model on a text."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from torch_mesh.cli.options import CPU_FIELDS, add_config_arguments, add_model_argument, given_config, positive
from torch_mesh.store.text import read_documents, token_sequences
from torch_mesh.system.atomic_files import check_results

if TYPE_CHECKING:
    from torch_mesh.prefetch.predictor import Recall

_HELD_OUT = 5  # every fifth sequence is held out for measuring
_WORTH_IT = 0.03  # gain in recall at k below which a predictor is not recommended


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs a model on the CPU over text and fits matrices that predict its experts, for MeshConfig(prefetch=...). "
        "Every fifth sequence is left out of the fit; the recall on those is printed beside that of the routers alone."
    )
    add_model_argument(parser)
    parser.add_argument(
        "--text", nargs="+", required=True, metavar="FILE", help='plain text, or .jsonl with a "text" in each line'
    )
    parser.add_argument("--out", required=True, metavar="PREDICTOR", help="the file to write (.safetensors)")
    parser.add_argument(
        "--tokens", type=positive, default=50000, help="how many tokens to run at most (default: %(default)s)"
    )
    parser.add_argument("--length", type=positive, default=512, help="tokens of a sequence (default: %(default)s)")
    add_config_arguments(parser, CPU_FIELDS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from torch_mesh.hf.open_model import open_model, open_tokenizer
    from torch_mesh.prefetch.predictor import FORMAT, fit, recall, save_predictor
    from torch_mesh.store.hub import local_folder

    config = given_config(arguments)
    check_results((arguments.out, f'{{"__metadata__":{{"format":"{FORMAT}"'))
    documents = read_documents(arguments.text)
    folder = local_folder(arguments.model)
    sequences = token_sequences(open_tokenizer(folder), documents, arguments.length, arguments.tokens)
    held_out = sequences[_HELD_OUT - 1 :: _HELD_OUT]
    if not held_out:
        raise ValueError(
            f"the text makes {len(sequences)} sequences of up to {arguments.length} tokens, but {_HELD_OUT} are "
            "needed: give more --text or --tokens, or a smaller --length"
        )
    learned_from = [sequence for index, sequence in enumerate(sequences, start=1) if index % _HELD_OUT]
    model = open_model(folder, config)
    predictor = fit(model, _shown(learned_from, "Fitting"))
    rows = recall(model, predictor, _shown(held_out, "Measuring"))
    _print_table(rows)
    save_predictor(predictor, arguments.out)
    print(_verdict(rows, arguments.out, sum(map(len, learned_from)), sum(map(len, held_out))))
    return 0


def _shown(sequences: Sequence[Any], what: str) -> Iterable[Any]:
    from tqdm.auto import tqdm

    return tqdm(sequences, desc=what, disable=None)


def _print_table(rows: Sequence[Recall]) -> None:
    table = Table("MoE layer", title="experts predicted, by how many are fetched", title_justify="left")
    for name in ("routers", "fitted"):
        for count in rows[0].fetched:
            table.add_column(f"{name}, {count}", justify="right")
    for row in rows:
        table.add_row(str(row.layer), *_cells(row.lookahead, len(row.fetched)), *_cells(row.fitted, len(row.fetched)))
    Console(width=120).print(table)


def _cells(rates: tuple[float, ...] | None, count: int) -> list[str]:
    return ["-"] * count if rates is None else [f"{rate:.1%}" for rate in rates]


def _verdict(rows: Sequence[Recall], out: str, learned_from: int, measured: int) -> str:
    path = os.path.abspath(out)  # MeshConfig takes no bare name for a path
    where = f"{out}: fitted to {learned_from} tokens, measured on {measured} others."
    both = [(row.fitted[0], row.lookahead[0]) for row in rows if row.lookahead is not None]
    if not both:
        return f"{where} Lookahead predicts nothing here; use it with MeshConfig(prefetch={path!r})."
    fitted, lookahead = (sum(column) / len(both) for column in zip(*both, strict=True))
    summary = f"{where} Lookahead predicts {lookahead:.1%} of the experts, the predictor {fitted:.1%}"
    if fitted - lookahead < _WORTH_IT:
        return f"{summary}: too little to gain by it. More --text of the kind that the model will read may help."
    return f"{summary}. Use it with MeshConfig(prefetch={path!r})."
