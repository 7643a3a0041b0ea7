"""A layer's experts on a GPU: Triton kernels over packed records (csrc/store/record.h), and their launches.

Activations are bf16, sums fp32. Weights are exact: integers, levels, FP8 and FP4 fit bf16, and the scale multiplies a
group's sum. The order of every sum depends on shapes only: splits are added in order, then a token's experts choice by
choice.

Few rows (``gate_up_few``, ``down_few``): one program per (token, choice) pair, block of 64 columns and split of the
depth, memory-bound. Many rows (``gate_up_many``, ``down_many``): a stable sort groups pairs by expert, and tiles of
rows go through ``tl.dot``.

Requires triton; TRITON_INTERPRET=1 runs it on CPU tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launches
from .device import DeviceLayer, DeviceRecord
from .launches import BLOCK_COLUMNS, REDUCE_COLUMNS, SCALE_WORDS, TRELLIS_BITS, VALUES_PER_WORD, Launch

# bf16 rows are loaded and stored as bits. The interpreter truncates where a GPU rounds, converts bf16 a hundred times
# slower than it shifts, and treats it as integers in tl.dot. There, values are rounded by hand and multiplied as
# float32: same values, same sums up to their order.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_OPERAND = tl.constexpr(tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16)


@triton.jit
def _to_bits(x):
    """float32 to the bits of the nearest bf16, int16."""
    if _INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where((bits & 0x7FFFFFFF) <= 0x7F800000, rounded, bits >> 16).to(tl.int16)
    else:
        return x.to(tl.bfloat16).to(tl.int16, bitcast=True)


@triton.jit
def _from_bits(bits):
    """The bits of bf16, int16, to float32."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _operand_from_bits(bits):
    if _INTERPRETED:
        return _from_bits(bits)
    else:
        return bits.to(tl.bfloat16, bitcast=True)


# -- words of a record -----------------------------------------------------------------------------


# Triton 3.6 turns the result of a jit function into a device value, which cannot be a shape.
_step = triton.constexpr_function(launches.depth_step)


@triton.constexpr_function
def _places(FORMAT):
    """Values in a word, or in a window of ``_windows``."""
    return VALUES_PER_WORD[FORMAT]


@triton.constexpr_function
def _code_bits(FORMAT):
    """Bits of a trellis code (csrc/store/trellis.h); 0 for other formats."""
    return TRELLIS_BITS[FORMAT]


@triton.constexpr_function
def _scale_words(FORMAT):
    """Words of scales in front of each group."""
    return SCALE_WORDS[FORMAT]


@triton.constexpr_function
def _has_step_scale(FORMAT, GROUP):
    """Whether a scale multiplies the sum of a step. nvfp4's scales multiply values: exact in bf16, and its groups are
    short."""
    return FORMAT not in ("bf16", "nvfp4") and GROUP > 0


@triton.constexpr_function
def _unit(FORMAT):
    """The power of two that ``_small_float`` leaves out of all products."""
    return {"mxfp4": 2.0**14, "nvfp4": 2.0**14 * 2.0**8, "fp8": 2.0**8}.get(FORMAT, 1.0)


@triton.constexpr_function
def _number(ACTIVATION, name):
    """The kind of an activation, or one of its parameters, as in torch_mesh/models/activations.py. Triton cannot call
    those functions."""
    spelled = "swiglu(alpha=1.702,offset=1,gate=7,up=7)" if ACTIVATION == "swigluoai" else ACTIVATION
    kind, _, numbers = spelled.partition("(")
    given = dict(pair.split("=") for pair in numbers[:-1].split(",") if pair)
    return kind if name == "kind" else float(given.get(name, {"alpha": 1, "offset": 0}.get(name, "inf")))


@triton.constexpr_function
def _four_levels(TABLE, first):
    """The levels of nibbles ``first`` to ``first + 3``, a byte each, from the tables of csrc/store/record.h and
    trellis.h."""
    table = {
        "lut4": (0, 7, 12, 16, 20, 23, 26, 29, 32, 35, 38, 42, 46, 51, 56, 63),
        "tcq2 first": (26, 23, 12, 17, 12, 32, 38, 21, 16, 21, 32, 8, 23, 14, 28, 1),
        "tcq2 second": (25, 12, 17, 18, 10, 3, 8, 14, 5, 12, 17, 8, 2, 0, 14, 22),
        "tcq3 first": (22, 23, 13, 9, 30, 13, 5, 22, 13, 32, 29, 15, 2, 17, 23, 36),
        "tcq3 second": (12, 9, 0, 18, 26, 8, 23, 13, 7, 18, 3, 12, 20, 15, 14, 6),
    }[TABLE]
    return sum(table[first + place] << (8 * place) for place in range(4))


@triton.jit
def _level(nibble, TABLE: tl.constexpr):
    """Four levels to a word: a table in memory would cost a read for each weight."""
    low = tl.where(nibble < 4, _four_levels(TABLE, 0), _four_levels(TABLE, 4))
    high = tl.where(nibble < 12, _four_levels(TABLE, 8), _four_levels(TABLE, 12))
    return (tl.where(nibble < 8, low, high) >> (nibble % 4 * 8)) & 255


@triton.jit
def _trellis_level(window, j, FORMAT: tl.constexpr):
    """The level of code ``j`` in a window, above kTrellisZero."""
    newest = window >> (14 + 2 * j)  # L(j) or T(j) of csrc/store/trellis.h
    older = window >> (10 + 2 * j)  # the same of j - 2
    if FORMAT == "tcq2":
        newest ^= window >> (6 + 2 * j)  # L(j - 4)
        return _level(newest & 15, "tcq2 first") + _level(older & 15, "tcq2 second") - 32
    else:
        older ^= window >> j  # H(j)
        return _level(newest & 15, "tcq3 first") + _level(older & 15, "tcq3 second") - 32


@triton.jit
def _half(bits):
    """The bits of fp16, an integer, as float32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _small_float(bits, FEWER: tl.constexpr, MASK: tl.constexpr):
    """E4M3 or E2M1 from bit 15 down, as float32, scaled by 2**-8 or 2**-14, the difference of the biases (``_unit``).

    Its exponent has ``FEWER`` bits less than fp16's; ``MASK`` selects exponent and mantissa. Subnormals are exact.
    """
    return _half((bits & 0x8000) | ((bits >> FEWER) & MASK))


@triton.jit
def _nibble_value(nibble, FORMAT: tl.constexpr):
    """The value of a 4-bit code, before scale and zero, as float32."""
    if FORMAT == "lut4":
        return _level(nibble, "lut4").to(tl.float32)
    elif _scale_words(FORMAT) == 16:  # FP4
        return _small_float(nibble << 12, 3, 0x0E00)
    else:
        return (nibble - 8).to(tl.float32)


@triton.jit
def _values(words, place, FORMAT: tl.constexpr):
    """The value at ``place`` of each word, before scale and zero, as float32."""
    if FORMAT == "bf16":
        return ((words >> (place * 16)) << 16).to(tl.float32, bitcast=True)
    elif FORMAT == "fp8":
        return _small_float(words.to(tl.int32) << (8 - place * 8), 1, 0x3F80)
    elif _code_bits(FORMAT) > 0:
        return _trellis_level(words, place, FORMAT).to(tl.float32)
    elif _places(FORMAT) == 4:
        return ((words << (24 - place * 8)) >> 24).to(tl.float32)
    else:
        return _nibble_value((words >> (place % 4 * 8 + place // 4 * 4)) & 15, FORMAT)


@triton.jit
def _bits(at, index, SIZE: tl.constexpr):
    """Number ``index`` of the ``SIZE``-bit numbers at ``at``, as integers."""
    EACH: tl.constexpr = 32 // SIZE
    return (tl.load(at + index // EACH) >> (index % EACH * SIZE)) & ((1 << SIZE) - 1)


@triton.jit
def _e8m0(bits):
    """0 for byte 0, as on the CPU."""
    return (bits << 23).to(tl.float32, bitcast=True)


@triton.jit
def _steps(block, block_words, depth, FORMAT: tl.constexpr):
    """Offset of a block's first step."""
    if FORMAT == "fp8":  # with the pairs, which end the block
        return (block + block_words - (depth + 63) // 64 * 1024).to(tl.pointer_type(tl.int16))
    elif FORMAT == "nvfp4":
        return block + 16
    else:
        return block


@triton.jit
def _step_length(FORMAT: tl.constexpr, GROUP: tl.constexpr):
    """Words from one step to the next."""
    SCALES: tl.constexpr = _scale_words(FORMAT)
    WORDS: tl.constexpr = _step(FORMAT, GROUP) // _places(FORMAT)
    if _code_bits(FORMAT) > 0:
        return SCALES + GROUP * 2 * _code_bits(FORMAT)
    elif SCALES > 0:
        return WORDS * 64 + _step(FORMAT, GROUP) // GROUP * SCALES
    else:
        return WORDS * 64


@triton.jit
def _words(block, step, index, block_words, FORMAT: tl.constexpr, GROUP: tl.constexpr):
    """The words of step ``index`` at ``step``, or a trellis' windows: [depth of a step / values in a word, 64]."""
    PLACES: tl.constexpr = _places(FORMAT)
    SCALES: tl.constexpr = _scale_words(FORMAT)
    if _code_bits(FORMAT) > 0:
        return _windows(block, index, block_words, FORMAT, GROUP)
    else:
        at = tl.arange(0, _step(FORMAT, GROUP) // PLACES)
        offsets = at * 64
        if SCALES > 0:
            offsets += (at // (GROUP // PLACES) + 1) * SCALES
        return tl.load(step + offsets[:, None] + tl.arange(0, 64)[None, :])


@triton.jit
def _stream_bytes(block, index, back, block_words, LOWEST: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr):
    """A stream's upper bits of group ``index``, or of ``back`` words of 16 inputs before it in the ring: int32 [GROUP /
    16, 4, 64].

    ``LOWEST``: instead, tcq3's lowest bits of the 32 inputs around each 16.
    """
    WORDS: tl.constexpr = GROUP // 16
    length = _step_length(FORMAT, GROUP)
    count = block_words // length * WORDS
    word = (index * WORDS + tl.arange(0, WORDS) - back + count) % count
    line = word % WORDS
    if LOWEST:
        line = line // 2 * 3 + 2
    elif FORMAT == "tcq3":
        line = line // 2 * 3 + line % 2
    columns = tl.arange(0, 64)
    part = columns // 16 * (GROUP * _code_bits(FORMAT) // 2) + columns % 16
    at = word // WORDS * length + _scale_words(FORMAT) + line * 16
    words = tl.load(block + at[:, None] + part[None, :])
    return (words[:, None, :] >> (tl.arange(0, 4) * 8)[None, :, None]) & 255


@triton.jit
def _windows(block, index, block_words, FORMAT: tl.constexpr, GROUP: tl.constexpr):
    """All codes that input 16 w + 4 j + s of word w and stream s depends on, in row 4 w + s: int32 [GROUP / 4, 64].

    Bits 16 and up are the word's own upper bits, bits 8 to 15 the previous ones; below are tcq2's before these, or
    tcq3's seven lowest bits.
    """
    own = _stream_bytes(block, index, 0, block_words, False, FORMAT, GROUP)
    before = _stream_bytes(block, index, 1, block_words, False, FORMAT, GROUP)
    if FORMAT == "tcq2":
        low = _stream_bytes(block, index, 2, block_words, False, FORMAT, GROUP)
    else:
        lowest = _stream_bytes(block, index, 2, block_words, True, FORMAT, GROUP)
        lowest |= _stream_bytes(block, index, 0, block_words, True, FORMAT, GROUP) << 8
        second = tl.arange(0, GROUP // 16) % 2  # of the two words that share lowest bits
        low = (lowest >> (5 + second * 4)[:, None, None]) & 127
    return tl.reshape(own << 16 | before << 8 | low, (GROUP // 4, 64))


@triton.jit
def _depth_of(word, place, FORMAT: tl.constexpr):
    """The index within a step of the value at ``place`` of a word or window."""
    if _code_bits(FORMAT) > 0:
        return word // 4 * 16 + place * 4 + word % 4
    else:
        return word * _places(FORMAT) + place


@triton.jit
def _step_scale(block, step, index, FORMAT: tl.constexpr, GROUP: tl.constexpr):
    """The factor for the sums of a step, float32 [1, 64] or one number."""
    columns = tl.arange(0, 64)[None, :]
    if FORMAT == "fp8":
        if GROUP == 32:
            return _e8m0(_bits(block + index * 16, columns, 8))
        else:
            return tl.load(block + index * 64 // GROUP).to(tl.float32, bitcast=True)
    elif FORMAT == "mxfp4":
        return _e8m0(_bits(step, columns, 8))
    elif (FORMAT == "int8_fp16") or (FORMAT == "int4_fp16"):
        return _half(_bits(step, columns, 16))
    else:
        return (_bits(step, columns, 16) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _apart(step, FORMAT: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr):
    """Per-value terms before the product, float32 [1 or COUNT, 64]: lut4's zeros, nvfp4's scales.

    ``COUNT``: rows into which the values of a step are packed.
    """
    columns = tl.arange(0, 64)[None, :]
    if FORMAT == "lut4":
        return (32 - _bits(step, columns, 16) % 4 * 2).to(tl.float32)
    elif FORMAT == "nvfp4":
        groups = tl.arange(0, COUNT) // (COUNT * GROUP // _step(FORMAT, GROUP))
        bits = _bits(step + groups[:, None] * (16 + GROUP * 8), columns, 8)
        return _small_float((bits & 0x7F) << 8, 1, 0x3F80)
    else:
        return columns


@triton.jit
def _with_apart(values, apart, FORMAT: tl.constexpr):
    """The values as they enter products; float32, exact in bf16."""
    if FORMAT == "lut4":
        values -= apart
    elif FORMAT == "nvfp4":
        values *= apart
    return values


@triton.jit
def _of_block(sums, block, FORMAT: tl.constexpr, GROUP: tl.constexpr):
    """The sums over all steps [64] or [any, 64], times the factor of the block as a whole."""
    UNIT: tl.constexpr = _unit(FORMAT)
    if UNIT != 1.0:
        sums *= UNIT
    if FORMAT == "nvfp4":
        factor = tl.load(block).to(tl.float32, bitcast=True)
        sums *= factor / tl.load(block + 1).to(tl.float32, bitcast=True)
    elif (FORMAT == "fp8") and (GROUP == 0):
        sums *= tl.load(block + tl.arange(0, 64)).to(tl.float32, bitcast=True)
    return sums


@triton.jit
def _bias(record, offset, columns, count):
    return tl.load(record + offset + columns, mask=columns < count, other=0).to(tl.float32, bitcast=True)


@triton.jit
def _slot_of(ids, table, pair, experts):
    """The slot; -1: not on this device, or not an expert."""
    expert = tl.load(ids + pair)
    return tl.load(table + expert, mask=(expert >= 0) & (expert < experts), other=-1)


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
    ADD: tl.constexpr,  # to what ``out`` holds
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
    # All choices at once: one after the other, each would wait for its id, its slot and its product in turn.
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


# -- launches --------------------------------------------------------------------------------------


def experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, layer: DeviceLayer, sentinels: bool, dtype: torch.dtype
) -> Tensor:
    """The part of a layer's output from experts on the device: [tokens, hidden] in ``dtype``.

    x [tokens, hidden], topk_ids and topk_weights [tokens, k] are on the device of ``layer``. Choices of experts that
    are not there add nothing. Ids outside [0, experts) make their token NaN, unless they are ``sentinels``, which add
    nothing.
    """
    return DeviceForward(x, topk_ids, topk_weights, layer, sentinels).compute(dtype)


class DeviceForward:
    """The rows of a forward, grouped by expert once: for the records of ``layer``, and for a prompt's as they
    arrive."""

    def __init__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, layer: DeviceLayer, sentinels: bool) -> None:
        self._layer, self._sentinels = layer, sentinels
        (tokens, top_k), record = topk_ids.shape, layer.record
        rows = x.to(torch.bfloat16).contiguous().view(torch.int16)
        ids = topk_ids.to(torch.int64).contiguous()
        weights = topk_weights.to(torch.float32).contiguous()
        each = max(1, layer.workspace // max(1, top_k * (4 * record.hidden + 2 * _width(record))))
        parts = [slice(begin, begin + each) for begin in range(0, tokens, each)] if topk_ids.numel() else []
        self._shape, self._device = (tokens, record.hidden), x.device
        with torch.cuda.device_of(x):
            self._chunks = [
                (part, _Chunk(rows[part], ids[part], weights[part], layer.table.numel(), record.gate_up_format))
                for part in parts
            ]

    def compute(self, dtype: torch.dtype) -> Tensor:
        """What the experts of the layer add: [tokens, hidden]."""
        if not self._chunks:
            return torch.zeros(self._shape, dtype=dtype, device=self._device)
        out = torch.empty(self._shape, dtype=dtype, device=self._device)
        self._compute(self._layer.record, self._layer.records, self._layer.table, out, False)
        return out

    def add(self, record: DeviceRecord, records: Tensor, table: Tensor, out: Tensor) -> None:
        """Add to ``out``, float32 [tokens, hidden], the part of the experts that ``table`` finds in ``records``."""
        self._compute(record, records, table, out, True)

    def _compute(self, record: DeviceRecord, records: Tensor, table: Tensor, out: Tensor, add: bool) -> None:
        with torch.cuda.device_of(out):
            for part, chunk in self._chunks:
                chunk.compute(record, records.view(torch.int32), table, self._sentinels, out[part], add)


def _width(record: DeviceRecord) -> int:
    """Columns of an activated row, in whole blocks."""
    return triton.cdiv(record.intermediate, BLOCK_COLUMNS) * BLOCK_COLUMNS


class _Chunk:
    """As many tokens as the workspace has room for."""

    def __init__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: int, format: str) -> None:
        self._x, self._ids, self._weights, self._experts = x, ids, weights, experts
        tiles = launches.uses_tiles(ids.numel(), experts)
        self._rows = launches.tile_rows(format, ids.numel(), experts) if tiles else 0
        self._grouping = _group(ids.view(-1), experts, self._rows) if self._rows else None

    def compute(
        self, record: DeviceRecord, records: Tensor, table: Tensor, sentinels: bool, out: Tensor, add: bool
    ) -> None:
        tokens, top_k = self._ids.shape
        activated = torch.empty((tokens * top_k, _width(record)), dtype=torch.int16, device=self._x.device)
        compute = self._few if self._grouping is None else self._many
        products = compute(record, records, table, activated)
        bits = out.dtype == torch.bfloat16
        to = out.view(torch.int16) if bits else out
        reduce[tokens, triton.cdiv(record.hidden, REDUCE_COLUMNS)](
            products,
            self._ids,
            self._weights,
            table,
            to,
            tokens * top_k,
            top_k,
            self._experts,
            record.hidden,
            SPLITS=products.size(0),
            SENTINELS=sentinels,
            ADD=add,
            BITS=bits,
            CHOICES=triton.next_power_of_2(top_k),
            COLUMNS=REDUCE_COLUMNS,
            **_options(launches.ELEMENTWISE),
        )

    def _few(self, record: DeviceRecord, records: Tensor, table: Tensor, activated: Tensor) -> Tensor:
        """Fills ``activated`` [pairs, width]; returns products [splits, pairs, hidden]."""
        gate_up, down = (_of_few(format) for format in (record.gate_up_format, record.down_format))
        (pairs, width), experts, device = activated.shape, self._experts, activated.device
        place = self._ids, table, records
        group = {"GROUP": record.group_size, "BIAS": record.bias}
        how = {"ACTIVATION": record.activation, "GATED": record.gated}

        blocks = width // BLOCK_COLUMNS
        splits = launches.splits(pairs, blocks * record.halves, record.hidden)
        partial = torch.empty((splits, pairs, record.halves, width), dtype=torch.float32, device=device)
        sizes = pairs, *self._gate_up_sizes(record)
        gate_up_few[pairs, blocks, splits](
            self._x, *place, activated, partial, *sizes, SPLITS=splits, **group, **how, **gate_up
        )
        if splits > 1:
            shape = pairs, experts, record.intermediate, width, record.words, record.gate_up_bias
            how |= {"BIAS": record.bias, "SPLITS": splits, **_options(launches.ELEMENTWISE)}
            activate_splits[pairs, blocks](*place, partial, activated, *shape, **how)

        blocks = triton.cdiv(record.hidden, BLOCK_COLUMNS)
        splits = launches.splits(pairs, blocks, record.intermediate)
        products = torch.empty((splits, pairs, record.hidden), dtype=torch.float32, device=device)
        sizes = pairs, *self._down_sizes(record)
        down_few[pairs, blocks, splits](activated, *place, products, *sizes, SPLITS=splits, **group, **down)
        return products

    def _many(self, record: DeviceRecord, records: Tensor, table: Tensor, activated: Tensor) -> Tensor:
        """Fills ``activated`` [pairs, width]; returns products [1, pairs, hidden]."""
        gate_up = {"FORMAT": record.gate_up_format, **_options(launches.MANY[record.gate_up_format])}
        down = {"FORMAT": record.down_format, **_options(launches.MANY[record.down_format])}
        pairs, width = activated.shape
        assert self._grouping is not None
        tiles = self._grouping[-1].numel()
        place = *self._grouping, table, records
        tile = {"GROUP": record.group_size, "BIAS": record.bias, "ROWS": self._rows}
        how = {"ACTIVATION": record.activation, "GATED": record.gated}

        grid = tiles, width // BLOCK_COLUMNS
        gate_up_many[grid](self._x, *place, activated, *self._gate_up_sizes(record), **tile, **how, **gate_up)

        products = torch.empty((1, pairs, record.hidden), dtype=torch.float32, device=activated.device)
        grid = tiles, triton.cdiv(record.hidden, BLOCK_COLUMNS)
        down_many[grid](activated, *place, products, *self._down_sizes(record), **tile, **down)
        return products

    def _gate_up_sizes(self, record: DeviceRecord) -> tuple[int, ...]:
        """The arguments of both gate_up kernels from ``top_k`` on."""
        shape = record.hidden, record.intermediate, _width(record), record.steps(record.hidden)
        return self._ids.size(1), self._experts, *shape, record.words, record.gate_up_block, record.gate_up_bias

    def _down_sizes(self, record: DeviceRecord) -> tuple[int, ...]:
        """The arguments of both down kernels from ``experts`` on."""
        shape = record.hidden, record.intermediate, _width(record), record.steps(record.intermediate)
        return self._experts, *shape, record.words, record.down, record.down_block, record.down_bias


def _group(ids: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """order, starts, tile_experts and tile_rows for gate_up_many, with as many tiles as the worst routing needs."""
    device = ids.device
    known = (ids >= 0) & (ids < experts)
    grouped, order = torch.sort(torch.where(known, ids, experts), stable=True)
    starts = torch.searchsorted(grouped, torch.arange(experts + 1, device=device))
    tiles = (starts[1:] - starts[:-1] + rows - 1) // rows
    ends = tiles.cumsum(0)
    tile = torch.arange(ids.numel() // rows + min(experts, ids.numel()), device=device)
    tile_experts = torch.searchsorted(ends, tile, right=True)
    known_experts = tile_experts.clamp(max=experts - 1)
    tile_rows = starts[known_experts] + (tile - (ends - tiles)[known_experts]) * rows
    return order, starts, tile_experts, tile_rows


def _of_few(format: str) -> dict[str, int | bool | str]:
    launch = launches.FEW[format]
    return {"FORMAT": format, "STAGES": launch.stages, **_options(launch)}


def _options(launch: Launch) -> dict[str, int | bool]:
    return {"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": True}
