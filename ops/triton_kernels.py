"""Triton kernels over packed records: products of few and of many rows, and the sum of a token's experts.

Few rows (``gate_up_few``, ``down_few``): one program per (token, choice) pair, block of 64 columns and split of the
depth, memory-bound. Many rows (``gate_up_many``, ``down_many``): tiles of an expert's rows go through ``tl.dot``.
The order of every sum depends on shapes only: splits are added in order, then a token's experts choice by choice.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch_mesh.ops.launches import VALUES_PER_WORD
from torch_mesh.ops.triton_records import (
    _OPERAND,
    _apart,
    _bias,
    _code_bits,
    _depth_of,
    _from_bits,
    _has_step_scale,
    _nibble_value,
    _of_block,
    _operand_from_bits,
    _places,
    _scale_words,
    _slot_of,
    _step,
    _step_length,
    _step_scale,
    _steps,
    _to_bits,
    _values,
    _with_apart,
    _words,
)

# -- activations -----------------------------------------------------------------------------------


@triton.constexpr_function
def _number(ACTIVATION, name):
    """The kind of an activation, or one of its parameters, as in torch_mesh/models/activations.py. Triton cannot call
    those functions."""
    spelled = "swiglu(alpha=1.702,offset=1,gate=7,up=7)" if ACTIVATION == "swigluoai" else ACTIVATION
    kind, _, numbers = spelled.partition("(")
    given = dict(pair.split("=") for pair in numbers[:-1].split(",") if pair)
    return kind if name == "kind" else float(given.get(name, {"alpha": 1, "offset": 0}.get(name, "inf")))


@triton.jit
def _tanh(u):
    size = tl.abs(u)
    e = tl.exp(-2.0 * size)
    far = (1.0 - e) / (1.0 + e)
    z = u * u
    near = u + u * z * (-0.33333334 + z * (0.13333304 + z * (-0.05395941 + z * (0.02176996 - 0.00834698 * z))))
    return tl.where(size < 0.5, near, tl.where(u < 0, -far, far))


@triton.jit
def _activate(gate, up, ACTIVATION: tl.constexpr, GATED: tl.constexpr):
    """The input of the down product. Without a gate ``up`` is ignored."""
    KIND: tl.constexpr = _number(ACTIVATION, "kind")
    GATE: tl.constexpr = _number(ACTIVATION, "gate")
    UP: tl.constexpr = _number(ACTIVATION, "up")
    if KIND == "swiglu":
        tl.static_assert(GATED)
        gate = tl.where(gate > GATE, GATE, gate)  # comparisons that keep NaN
        OFFSET: tl.constexpr = _number(ACTIVATION, "offset")
        ALPHA: tl.constexpr = _number(ACTIVATION, "alpha")
        up = tl.where(up > UP, UP, tl.where(up < -UP, -UP, up)) + OFFSET
        result = gate / (1.0 + tl.exp(-ALPHA * gate))
    elif KIND == "softcap":
        tl.static_assert(GATED)
        up = _tanh(up / UP) * UP
        result = _tanh(gate / GATE) * GATE / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "relu2":
        result = tl.where(gate < 0.0, 0.0, gate)  # keeps NaN
        result = result * result
    elif ACTIVATION == "silu":
        result = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        result = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        result = gate / (1.0 + tl.exp(-inner))
    if GATED:
        result *= up
    return result


# -- products --------------------------------------------------------------------------------------


@triton.jit
def _row_times_blocks(
    row,
    depth,
    block,
    block_words,
    first,
    last,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HALVES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One row [depth] times steps ``first`` to ``last`` of one or two neighbouring blocks of columns: two float32 [64],
    the same one twice for one block.

    Both blocks of a step are loaded before either is used: a program waits for memory half as often.
    """
    PLACES: tl.constexpr = _places(FORMAT)
    STEP: tl.constexpr = _step(FORMAT, GROUP)
    COUNT: tl.constexpr = STEP // PLACES
    words_at = tl.arange(0, COUNT)
    steps = _steps(block, block_words, depth, FORMAT)
    other_block = block + (HALVES - 1) * block_words
    other_steps = _steps(other_block, block_words, depth, FORMAT)
    total = tl.zeros((COUNT, 64), tl.float32)
    other_total = total
    for index in tl.range(first, last, num_stages=STAGES):
        step = steps + index * _step_length(FORMAT, GROUP)
        words = _words(block, step, index, block_words, FORMAT, GROUP)
        apart = _apart(step, FORMAT, GROUP, COUNT)
        part = tl.zeros((COUNT, 64), tl.float32)
        other_step, other_words, other_apart, other_part = step, words, apart, part
        if HALVES == 2:
            other_step = other_steps + index * _step_length(FORMAT, GROUP)
            other_words = _words(other_block, other_step, index, block_words, FORMAT, GROUP)
            other_apart = _apart(other_step, FORMAT, GROUP, COUNT)
        for place in tl.static_range(PLACES):
            k = index * STEP + _depth_of(words_at, place, FORMAT)
            x = _from_bits(tl.load(row + k, mask=k < depth, other=0))[:, None]
            part += x * _with_apart(_values(words, place, FORMAT), apart, FORMAT)
            if HALVES == 2:
                other_part += x * _with_apart(_values(other_words, place, FORMAT), other_apart, FORMAT)
        if _has_step_scale(FORMAT, GROUP):
            part *= _step_scale(block, step, index, FORMAT, GROUP)
            if HALVES == 2:
                other_part *= _step_scale(other_block, other_step, index, FORMAT, GROUP)
        total += part
        if HALVES == 2:
            other_total += other_part
    # The block's factor f comes after the sum over threads. Before it, the compiler would fuse each product with the
    # sum: fma(a, f, b * f) in one thread, fma(b, f, a * f) in another, which differ in their last bits.
    result = _of_block(tl.sum(total, 0), block, FORMAT, GROUP)
    if HALVES == 2:
        return result, _of_block(tl.sum(other_total, 0), other_block, FORMAT, GROUP)
    else:
        return result, result


@triton.constexpr_function
def _parts(FORMAT):
    """Tiles into which a step is divided: two for 4-bit codes, of low and of high nibbles."""
    return 2 if VALUES_PER_WORD[FORMAT] == 8 else 1


@triton.jit
def _tile_depth(PART: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr):
    """The index within a step of each row of ``_tile_values``."""
    STEP: tl.constexpr = _step(FORMAT, GROUP)
    if _parts(FORMAT) == 2:
        at = tl.arange(0, STEP // 2)
        return at // 4 * 8 + at % 4 + PART * 4
    else:
        return tl.arange(0, STEP)


@triton.jit
def _tile_codes(block, step, index, block_words, FORMAT: tl.constexpr, GROUP: tl.constexpr):
    """The words of a step, or for 4-bit codes their bytes: [depth of a step / codes in an element, 64].

    Loading 4-bit codes as bytes is 1.4 times as fast as taking words apart (docs/decisions/0025).
    """
    PLACES: tl.constexpr = _places(FORMAT)
    if _parts(FORMAT) == 2:
        SCALES: tl.constexpr = _scale_words(FORMAT)
        at = tl.arange(0, _step(FORMAT, GROUP) // 2)
        offsets = at // 4 * 256 + at % 4
        if SCALES > 0:
            offsets += (at // 4 // (GROUP // PLACES) + 1) * (SCALES * 4)
        return tl.load(step.to(tl.pointer_type(tl.int8)) + offsets[:, None] + tl.arange(0, 64)[None, :] * 4)
    else:
        return _words(block, step, index, block_words, FORMAT, GROUP)


@triton.jit
def _tile_values(codes, apart, PART: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr):
    """The values of ``_tile_codes``, or of its low or high nibbles: _OPERAND [depth of a step / parts, 64]."""
    if _parts(FORMAT) == 2:
        values = _nibble_value((codes.to(tl.int32) >> (PART * 4)) & 15, FORMAT)
        return _with_apart(values, apart, FORMAT).to(_OPERAND)
    else:
        return _unpacked(codes, FORMAT, _step(FORMAT, GROUP))


@triton.jit
def _operand(words, place, FORMAT: tl.constexpr):
    return _values(words, place, FORMAT).to(_OPERAND)


@triton.jit
def _unpacked(words, FORMAT: tl.constexpr, STEP: tl.constexpr):
    """The values of words or windows [STEP / values in each, 64] in depth order: _OPERAND [STEP, 64]."""
    if _places(FORMAT) == 2:
        both = tl.join(_operand(words, 0, FORMAT), _operand(words, 1, FORMAT))
        return tl.reshape(tl.permute(both, (0, 2, 1)), (STEP, 64))
    else:
        even = tl.join(_operand(words, 0, FORMAT), _operand(words, 2, FORMAT))
        odd = tl.join(_operand(words, 1, FORMAT), _operand(words, 3, FORMAT))
        if _code_bits(FORMAT) > 0:
            streams = tl.reshape(tl.join(even, odd), (STEP // 16, 4, 64, 2, 2))
            return tl.reshape(tl.permute(streams, (0, 3, 4, 1, 2)), (STEP, 64))
        else:
            return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 1)), (STEP, 64))


@triton.jit
def _tile_product(
    rows,
    here,
    depth,
    codes,
    block,
    step,
    index,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rows times the codes of a step: float32 [ROWS, 64]."""
    STEP: tl.constexpr = _step(FORMAT, GROUP)
    apart = _apart(step, FORMAT, GROUP, STEP // _parts(FORMAT))
    sums = tl.zeros((ROWS, 64), tl.float32)
    for part in tl.static_range(_parts(FORMAT)):
        k = index * STEP + _tile_depth(part, FORMAT, GROUP)
        x = tl.load(rows[:, None] + k[None, :], mask=here[:, None] & (k < depth)[None, :], other=0)
        sums = tl.dot(_operand_from_bits(x), _tile_values(codes, apart, part, FORMAT, GROUP), sums)
    if _has_step_scale(FORMAT, GROUP):
        sums *= _step_scale(block, step, index, FORMAT, GROUP)
    return sums


@triton.jit
def _rows_times_block(
    rows, here, depth, block, block_words, steps, FORMAT: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr
):
    """Rows [ROWS] of pointers, masked by ``here``, times a block of columns: float32 [ROWS, 64]."""
    first = _steps(block, block_words, depth, FORMAT)
    total = tl.zeros((ROWS, 64), tl.float32)
    for index in range(steps):
        step = first + index * _step_length(FORMAT, GROUP)
        codes = _tile_codes(block, step, index, block_words, FORMAT, GROUP)
        total += _tile_product(rows, here, depth, codes, block, step, index, FORMAT, GROUP, ROWS)
    return _of_block(total, block, FORMAT, GROUP)


# -- few rows --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["pairs"])
def gate_up_few(
    x,  # bits of bf16 [tokens, depth]
    ids,  # int64 [pairs]
    table,
    records,
    activated,  # bits of bf16 [pairs, width]
    partial,  # float32 [SPLITS, pairs, halves, width]; not used for one split
    pairs,
    top_k,
    experts,
    depth,
    intermediate,
    width,
    steps,
    record_words,
    block_words,
    bias_offset,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    HALVES: tl.constexpr = 2 if GATED else 1
    pair = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    split = tl.program_id(2)
    slot = _slot_of(ids, table, pair, experts)
    if slot < 0:
        return
    record = records + slot.to(tl.int64) * record_words
    row = x + pair // top_k * depth
    each = (steps + SPLITS - 1) // SPLITS
    first = split * each
    last = tl.minimum(first + each, steps)
    columns = block * 64 + tl.arange(0, 64)
    start = record + block * HALVES * block_words
    gate, up = _row_times_blocks(row, depth, start, block_words, first, last, FORMAT, GROUP, HALVES, STAGES)
    if SPLITS == 1:
        if BIAS:
            gate += _bias(record, bias_offset, columns, intermediate)
            if GATED:
                up += _bias(record, bias_offset + intermediate, columns, intermediate)
        result = _activate(gate, up, ACTIVATION, GATED)
        tl.store(activated + pair * width + columns, _to_bits(result))
    else:
        to = partial + (split.to(tl.int64) * pairs + pair) * HALVES * width + columns
        tl.store(to, gate)
        if GATED:
            tl.store(to + width, up)


@triton.jit(do_not_specialize=["pairs"])
def activate_splits(
    ids,
    table,
    records,
    partial,
    activated,
    pairs,
    experts,
    intermediate,
    width,
    record_words,
    bias_offset,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    HALVES: tl.constexpr = 2 if GATED else 1
    pair = tl.program_id(0).to(tl.int64)
    slot = _slot_of(ids, table, pair, experts)
    if slot < 0:
        return
    record = records + slot.to(tl.int64) * record_words
    columns = tl.program_id(1) * 64 + tl.arange(0, 64)
    gate = tl.zeros((64,), tl.float32)
    up = tl.zeros((64,), tl.float32)
    for split in tl.static_range(SPLITS):
        part = partial + (split * pairs + pair) * HALVES * width + columns
        gate += tl.load(part)
        if GATED:
            up += tl.load(part + width)
    if BIAS:
        gate += _bias(record, bias_offset, columns, intermediate)
        if GATED:
            up += _bias(record, bias_offset + intermediate, columns, intermediate)
    result = _activate(gate, up, ACTIVATION, GATED)
    tl.store(activated + pair * width + columns, _to_bits(result))


@triton.jit(do_not_specialize=["pairs"])
def down_few(
    activated,
    ids,
    table,
    records,
    products,  # float32 [SPLITS, pairs, hidden]
    pairs,
    experts,
    hidden,
    intermediate,
    width,
    steps,
    record_words,
    offset,
    block_words,
    bias_offset,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    split = tl.program_id(2)
    slot = _slot_of(ids, table, pair, experts)
    if slot < 0:
        return
    record = records + slot.to(tl.int64) * record_words
    each = (steps + SPLITS - 1) // SPLITS
    first = split * each
    last = tl.minimum(first + each, steps)
    row = activated + pair * width
    start = record + offset + block * block_words
    product, _ = _row_times_blocks(row, intermediate, start, block_words, first, last, FORMAT, GROUP, 1, STAGES)
    columns = block * 64 + tl.arange(0, 64)
    if BIAS:
        product += tl.where(split == 0, _bias(record, bias_offset, columns, hidden), 0.0)
    to = products + (split.to(tl.int64) * pairs + pair) * hidden + columns
    tl.store(to, product, mask=columns < hidden)


# -- many rows -------------------------------------------------------------------------------------


@triton.jit
def _tile(order, starts, tile_experts, tile_rows, table, experts, ROWS: tl.constexpr):
    """(slot or -1, pairs [ROWS], mask) of this program's tile."""
    tile = tl.program_id(0)
    expert = tl.load(tile_experts + tile)
    at = tl.load(tile_rows + tile) + tl.arange(0, ROWS)
    here = at < tl.load(starts + expert + 1, mask=expert < experts, other=0)
    slot = tl.load(table + expert, mask=expert < experts, other=-1)
    return slot, tl.load(order + at, mask=here, other=0), here


@triton.jit
def gate_up_many(
    x,
    order,  # int64 [pairs]: pairs, grouped by expert
    starts,  # int64 [experts + 1]: start of each expert's pairs
    tile_experts,  # int64 [tiles]: the expert, or the number of experts for an empty tile
    tile_rows,  # int64 [tiles]: position in the order
    table,
    records,
    activated,
    top_k,
    experts,
    depth,
    intermediate,
    width,
    steps,
    record_words,
    block_words,
    bias_offset,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
):
    HALVES: tl.constexpr = 2 if GATED else 1
    slot, pairs, here = _tile(order, starts, tile_experts, tile_rows, table, experts, ROWS)
    if slot < 0:
        return
    record = records + slot.to(tl.int64) * record_words
    rows = x + pairs // top_k * depth
    block = tl.program_id(1)
    columns = block * 64 + tl.arange(0, 64)
    start = record + block * HALVES * block_words
    gate = _rows_times_block(rows, here, depth, start, block_words, steps, FORMAT, GROUP, ROWS)
    if BIAS:
        gate += _bias(record, bias_offset, columns, intermediate)[None, :]
    up = gate
    if GATED:
        start += block_words
        up = _rows_times_block(rows, here, depth, start, block_words, steps, FORMAT, GROUP, ROWS)
        if BIAS:
            up += _bias(record, bias_offset + intermediate, columns, intermediate)[None, :]
    result = _activate(gate, up, ACTIVATION, GATED)
    tl.store(activated + pairs[:, None] * width + columns[None, :], _to_bits(result), mask=here[:, None])


@triton.jit
def down_many(
    activated,
    order,
    starts,
    tile_experts,
    tile_rows,
    table,
    records,
    products,
    experts,
    hidden,
    intermediate,
    width,
    steps,
    record_words,
    offset,
    block_words,
    bias_offset,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
):
    slot, pairs, here = _tile(order, starts, tile_experts, tile_rows, table, experts, ROWS)
    if slot < 0:
        return
    record = records + slot.to(tl.int64) * record_words
    block = tl.program_id(1)
    columns = block * 64 + tl.arange(0, 64)
    product = _rows_times_block(
        activated + pairs * width,
        here,
        intermediate,
        record + offset + block * block_words,
        block_words,
        steps,
        FORMAT,
        GROUP,
        ROWS,
    )
    if BIAS:
        product += _bias(record, bias_offset, columns, hidden)[None, :]
    to = products + pairs[:, None] * hidden + columns[None, :]
    tl.store(to, product, mask=here[:, None] & (columns < hidden)[None, :])


# -- the end ---------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["pairs"])
def reduce(
    products,  # float32 [SPLITS, pairs, hidden]
    ids,
    weights,  # float32 [pairs]
    table,
    out,  # [tokens, hidden]
    pairs,
    top_k,
    experts,
    hidden,
    SPLITS: tl.constexpr,
    SENTINELS: tl.constexpr,
    ADD: tl.constexpr,  # add to the values in ``out``
    BITS: tl.constexpr,  # ``out`` is bits of bf16
    CHOICES: tl.constexpr,  # top_k, rounded up to a power of two
    COLUMNS: tl.constexpr,
):
    """out = sum over a token's choices, in an order that depends on their number alone.

    An id outside [0, experts) makes the token NaN: kernels cannot raise.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < hidden
    # Compute all choices at once: one after the other, each would wait for its id, its slot and its product.
    choice = tl.arange(0, CHOICES)
    pair = token * top_k + choice
    expert = tl.load(ids + pair, mask=choice < top_k, other=0)
    known = expert >= 0
    if not SENTINELS:
        known = known & (expert < experts)
    here = (choice < top_k) & (expert >= 0) & (expert < experts)
    here = here & (tl.load(table + expert, mask=here, other=-1) >= 0)
    product = tl.zeros((CHOICES, COLUMNS), tl.float32)
    for split in tl.static_range(SPLITS):
        part = products + (split * pairs + pair)[:, None] * hidden + columns[None, :]
        product += tl.load(part, mask=here[:, None] & inside[None, :], other=0.0)
    weight = tl.load(weights + pair, mask=here, other=0.0)
    total = tl.sum(tl.where(here[:, None], weight[:, None] * product, 0.0), 0)
    to = out + token * hidden + columns
    if ADD:
        total += tl.load(to, mask=inside, other=0.0)
    total = tl.where(tl.min(known.to(tl.int32), 0) > 0, total, float("nan"))
    if BITS:
        tl.store(to, _to_bits(total), mask=inside)
    else:
        tl.store(to, total.to(out.dtype.element_ty), mask=inside)
