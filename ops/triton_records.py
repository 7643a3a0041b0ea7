"""Packed records (csrc/store/record.h) in Triton: values, scales and biases of an expert, and rows in bf16."""

from __future__ import annotations

import triton
import triton.language as tl
from torch_mesh.ops import launches
from torch_mesh.ops.launches import SCALE_WORDS, TRELLIS_BITS, VALUES_PER_WORD

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


# Words of a tile of bf12, and of a tile with its part of the block's header.
_BF12_TILE = tl.constexpr(32 * 192 // 4)
_BF12_WORDS = tl.constexpr(32 * 192 // 4 + 16)

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
    return FORMAT not in ("bf16", "bf12", "nvfp4") and GROUP > 0


@triton.constexpr_function
def _unit(FORMAT):
    """The power of two that ``_small_float`` leaves out of all products."""
    return {"mxfp4": 2.0**14, "nvfp4": 2.0**14 * 2.0**8, "fp8": 2.0**8}.get(FORMAT, 1.0)


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
    if (FORMAT == "bf16") or (FORMAT == "bf12"):
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
    if FORMAT == "fp8":  # steps lie beside the pairs, which end the block
        return (block + block_words - (depth + 63) // 64 * 1024).to(tl.pointer_type(tl.int16))
    elif FORMAT == "nvfp4":
        return block + 16
    elif FORMAT == "bf12":
        return block + block_words // _BF12_WORDS * (_BF12_WORDS - _BF12_TILE)
    else:
        return block


@triton.jit
def _step_length(FORMAT: tl.constexpr, GROUP: tl.constexpr):
    """Words from one step to the next."""
    SCALES: tl.constexpr = _scale_words(FORMAT)
    WORDS: tl.constexpr = _step(FORMAT, GROUP) // _places(FORMAT)
    if FORMAT == "bf12":
        return _BF12_TILE
    elif _code_bits(FORMAT) > 0:
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
    elif FORMAT == "bf12":
        return _bf12_words(block, step, index, block_words)
    else:
        at = tl.arange(0, _step(FORMAT, GROUP) // PLACES)
        offsets = at * 64
        if SCALES > 0:
            offsets += (at // (GROUP // PLACES) + 1) * SCALES
        return tl.load(step + offsets[:, None] + tl.arange(0, 64)[None, :])


@triton.jit
def _bf12_words(block, tile, index, block_words):
    """A tile of bf12 (csrc/store/bf12.h) as words of bf16: int32 [32, 64]."""
    tiles = block_words // _BF12_WORDS
    rows, columns = tl.arange(0, 32)[:, None], tl.arange(0, 64)[None, :]
    half = columns // 32
    # Pairs of lower bytes within 32 columns. The names of their upper bytes are at the same index, in the nibbles of
    # their half.
    pair = columns % 16 // 4 * 8 + columns % 32 // 16 * 4 + columns % 4
    row = tile.to(tl.pointer_type(tl.int16)) + rows * 96
    lower = tl.load(row + half * 32 + pair).to(tl.int32)
    names = tl.load(row + 64 + pair).to(tl.int32) >> (half * 4)
    table = block + index * 4
    first, second, third, last = tl.load(table), tl.load(table + 1), tl.load(table + 2), tl.load(table + 3)
    words = (lower & 255) | (lower & 0xFF00) << 8
    for place in tl.static_range(2):
        name = (names >> (place * 8)) & 15
        four = tl.where(name < 8, tl.where(name < 4, first, second), tl.where(name < 12, third, last))
        words |= (four >> (name % 4 * 8) & 255) << (8 + place * 16)
    ends = block + tiles * 4 + index
    room = tiles * 11
    end = _limited(tl.load(ends), room)
    at = words * 0 + rows * 64 + columns
    for exception in range(_limited(tl.load(ends - 1, mask=index > 0, other=0), room), end):
        upper = tl.load(block + tiles * 5 + exception)
        shift = ((upper >> 8) & 3) * 8
        words = tl.where(at == ((upper >> 10) & 2047), words & ~(255 << shift) | (upper & 255) << shift, words)
    return words


@triton.jit
def _limited(count, room):
    """A count of exceptions, limited to the possible maximum: a damaged record may have any count."""
    return tl.where((count < 0) | (count > room), room, count)


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
    """Row 4 w + s has all codes on which inputs 16 w + 4 j + s depend (word w, stream s, all j): int32 [GROUP / 4, 64].

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
