// Expands codes of GGUF's types (store/gguf_types.h) to bytes, which are then multiplied as other
// formats' words. Include after the target's simd header.
#pragma once

#include "kernels/products-inl.h"
#include "store/gguf_types.h"

namespace torch_mesh {
namespace {

constexpr int32_t kGgufColumns = 16;  // columns whose words are beside each other
constexpr int32_t kGgufLine = kGgufColumns * 4;

// Unsigned bytes up to kMax, of which kZero is that of a weight of zero.
template <int kZero, int kMax>
struct UnsignedBytes {
  static constexpr int kMaxByte = kMax;
  static Words zeros(const std::byte*) { return broadcast_word(kZero); }
};

// Shifts words left by kLeft bits, or right if it is negative.
template <int kLeft>
inline Words moved(Words words) {
  if constexpr (kLeft > 0) {
    return shift_left<kLeft>(words);
  } else if constexpr (kLeft < 0) {
    return shift_right<-kLeft>(words);
  } else {
    return words;
  }
}

// The levels of a type minus `lowest`, as bytes.
struct LevelBytes {
  alignas(16) uint8_t bytes[16];

  constexpr LevelBytes(const int8_t* levels, int32_t lowest) : bytes{} {
    for (int i = 0; i < 16; ++i) bytes[i] = static_cast<uint8_t>(levels[i] - lowest);
  }
};

// The codes of kLanes columns, whose words of a part begin at `words`. For types with levels: the
// level or, if kUnsigned, the level minus the lowest one.
template <Format kFormat, bool kUnsigned>
struct GgufCodes {
  static constexpr GgufType kType = gguf_type(kFormat);
  static constexpr int kPairBits = kType.bits % 4 >= 2 ? 2 : 0;
  static constexpr int kPairs = kType.bits >= 4 ? 4 : 0;             // first word of bit pairs
  static constexpr int kSingles = kPairs + (kPairBits > 0 ? 2 : 0);  // word of single bits
  static constexpr int kPairBit = kType.bits >= 4 ? 4 : 0;           // first bit of pairs in a code
  static constexpr int kSingleBit = kPairBit + kPairBits;

  static Words word(const std::byte* words, int32_t index) {
    return load_once(words + index * kGgufLine);
  }

  // Inputs [4 * kFour, 4 * kFour + 4), a byte each.
  template <int kFour>
  static Words four(const std::byte* words) {
    Words codes{};
    if constexpr (kType.bits >= 4) {
      codes = word(words, kFour / 2);
      codes = low_nibbles(kFour % 2 == 0 ? codes : shift_right<4>(codes));
    }
    if constexpr (kPairBits > 0) {
      const Words pairs = word(words, kPairs + kFour / 4);
      const Words own = moved<kPairBit - kFour % 4 * 2>(pairs);
      codes = codes | (own & broadcast_word(0x03030303u << kPairBit));
    }
    if constexpr (kType.bits > kSingleBit) {
      const Words own = moved<kSingleBit - kFour>(word(words, kSingles));
      codes = codes | (own & broadcast_word(0x01010101u << kSingleBit));
    }
    if constexpr (kType.levels != nullptr) {
      static constexpr LevelBytes kLevels(kType.levels, kUnsigned ? kType.lowest_level() : 0);
      codes = look_up_bytes(kLevels.bytes, codes);
    }
    return codes;
  }
};

// Calls take(Constant<i>, low, high) for inputs [8 i, 8 i + 8) of a part, i in [kFirst, kEnd).
template <typename Codes, int kFirst, int kEnd, typename Take>
inline void read_gguf(const std::byte* words, const Take& take) {
  if constexpr (kFirst < kEnd) {
    take(Constant<kFirst>{}, Codes::template four<2 * kFirst>(words),
         Codes::template four<2 * kFirst + 1>(words));
    read_gguf<Codes, kFirst + 1, kEnd>(words, take);
  }
}

// Scales and mins of kLanes columns of a group, from `d` and the group's steps.
template <Format kFormat>
struct GgufSteps {
  static constexpr GgufType kType = gguf_type(kFormat);

  static Floats scale(Floats d, const std::byte* steps) {
    if constexpr (!kType.steps) {
      return d;
    } else if constexpr (kType.is_signed) {
      return d * words_to_floats(load_signed_bytes(steps));
    } else if constexpr (kType.has_nibbles()) {
      return d * words_to_floats(load_bytes(steps) & broadcast_word(15));
    } else if constexpr (kType.unit != 1) {
      return d * words_to_floats(load_bytes(steps)) * broadcast(kType.unit);
    } else {
      return d * words_to_floats(load_bytes(steps));
    }
  }
  // `d` is that of the mins, or that of the scales if mins have none.
  static Floats min(Floats d, const std::byte* steps) {
    if constexpr (kType.mins == GgufMins::kEighths) {
      const Floats eighths = words_to_floats(shift_right<4>(load_bytes(steps)));
      return scale(d, steps) * eighths * broadcast(kGgufEighth);
    } else if constexpr (kType.mins == GgufMins::kBytes) {
      return d * words_to_floats(load_bytes(steps + kBlockColumns));
    } else if constexpr (kType.mins == GgufMins::kNibbles) {
      return d * words_to_floats(shift_right<4>(load_bytes(steps)));
    } else {
      return d;
    }
  }
};

// The place of group `group` in a block.
template <Format kFormat>
struct GgufPlace {
  static constexpr GgufType kType = gguf_type(kFormat);
  static constexpr int32_t kOfStretch = kType.depth / kType.group;
  static constexpr int32_t kOfPart = kType.part_groups();

  const std::byte* header;
  const std::byte* steps;
  const std::byte* words;  // of its part
  bool is_second;          // of two in a part

  GgufPlace(const std::byte* block, int32_t group) {
    header = block + group / kOfStretch * kType.stretch_bytes();
    const int32_t within = group % kOfStretch;
    const std::byte* part = header + kType.header_bytes() + within / kOfPart * kType.part_bytes();
    const int32_t each = kBlockColumns * kType.step_bytes();
    is_second = within % kOfPart == 1;
    steps = part + within % kOfPart * each;
    words = part + kOfPart * each;
  }

  Floats scale(int32_t column) const {
    return GgufSteps<kFormat>::scale(load_half(header + column * 2), steps + column);
  }
  Floats min(int32_t column) const {
    constexpr int32_t kFirst = kType.has_half_mins() ? kBlockColumns : 0;
    return GgufSteps<kFormat>::min(load_half(header + (kFirst + column) * 2), steps + column);
  }

  // Writes words of four codes of the group, [kType.group / 4][kBlockColumns].
  template <bool kUnsigned>
  void expand(std::byte* to) const {
    using Codes = GgufCodes<kFormat, kUnsigned>;
    for (int32_t c = 0; c < kBlockColumns; c += kLanes) {
      const std::byte* from =
          words + c / kGgufColumns * (kType.bits * kGgufLine) + c % kGgufColumns * 4;
      const auto store = [&](auto eight, Words low, Words high) {
        std::byte* at = to + (eight.value % (kType.group / 8) * 2 * kBlockColumns + c) * 4;
        store_words(at, low);
        store_words(at + kBlockColumns * 4, high);
      };
      if constexpr (kOfPart == 1) {
        read_gguf<Codes, 0, 4>(from, store);
      } else if (is_second) {
        read_gguf<Codes, 2, 4>(from, store);
      } else {
        read_gguf<Codes, 0, 2>(from, store);
      }
    }
  }
};

// As IntegerGroup; its words, scales and mins are expanded once for all rows.
template <Format kFormat>
struct GgufGroup {
  static constexpr GgufType kType = gguf_type(kFormat);
  static constexpr bool kHasMins = kType.has_mins();

  const std::byte* scales;
  const std::byte* words;
  int32_t count = kType.group / 8;  // of pairs of words
  alignas(64) std::byte codes[kGgufPart * kBlockColumns];

  GgufGroup(const BlockProducts& products, int32_t group) {
    const GgufPlace<kFormat> place(products.block, group);
    scales = place.steps;
    // Groups share the stretch, with its header, equally.
    const std::byte* own = products.block + group * total_bytes();
    for (int64_t line = 0; line < total_bytes(); line += kLineBytes) {
      __builtin_prefetch(own + kPrefetchBytes + line);
    }
    place.template expand<kType.has_unsigned_bytes()>(codes);
    words = codes;
    for (int32_t c = 0; c < kBlockColumns; c += kLanes) {
      store(scale_ + c, place.scale(c));
      if constexpr (kHasMins) store(min_ + c, place.min(c));
    }
  }
  GgufGroup(const GgufGroup&) = delete;
  GgufGroup& operator=(const GgufGroup&) = delete;

  const std::byte* scales_of(int32_t) const { return scales; }
  Floats scale(int32_t column) const { return load(scale_ + column); }
  Floats min(int32_t column) const { return load(min_ + column); }
  int64_t total_bytes() const { return kType.stretch_bytes() * kType.group / kType.depth; }

 private:
  alignas(64) float scale_[kBlockColumns];
  alignas(64) float min_[kBlockColumns];
};

// The halves that all groups of a stretch have scales and mins from, in fp32. GgufSteps::min takes
// of_mins().
template <Format kFormat>
struct GgufHeader {
  static constexpr GgufType kType = gguf_type(kFormat);
  alignas(64) float d[kBlockColumns];
  alignas(64) float min[kBlockColumns];

  const float* of_mins() const { return kType.has_half_mins() ? min : d; }

  void read(const std::byte* stretch) {
    for (int32_t c = 0; c < kBlockColumns; c += kLanes) {
      store(d + c, load_half(stretch + c * 2));
      if constexpr (kType.has_half_mins()) {
        store(min + c, load_half(stretch + (kBlockColumns + c) * 2));
      }
    }
  }
};

// Sums of one row's products with the codes of a part's groups. If a Dot has 16-bit sums, these
// take as many products as fit before they are widened.
template <typename Dot, Format kFormat>
struct GgufSums {
  static constexpr GgufType kType = gguf_type(kFormat);
  static constexpr int kGroups = kType.part_groups();
  static constexpr int kEights = 4 / kGroups;  // of a group
  static constexpr int kFours = fours_in_int16(kType.max_byte());
  static constexpr int kNarrow = kFours >= 4 ? 4 : kFours >= 2 ? 2 : 1;
  static constexpr int kChains = kGroups == 1 ? Dot::kChains : 1;

  Sums sums[kGroups][kChains];
  Words narrow;

  explicit GgufSums(const Sums (&start)[kGroups]) {
    for (int g = 0; g < kGroups; ++g) {
      sums[g][0] = start[g];
      for (int i = 1; i < kChains; ++i) sums[g][i] = as_sums(broadcast_word(0));
    }
  }

  template <int kEight>
  void add(const typename Dot::Row& row, const typename Dot::Weights& weights) {
    Sums& sum = sums[kEight / kEights][kEight % kChains];
    if constexpr (requires { Dot::narrow(row, weights); }) {
      static_assert(kFours >= 1);
      constexpr int kPlace = kEight % kEights % kNarrow;
      const Words products = Dot::narrow(row, weights);
      narrow = kPlace == 0 ? products : add_int16(narrow, products);
      if constexpr (kPlace == kNarrow - 1 || kEight % kEights == kEights - 1) {
        sum = Dot::widen(sum, narrow);
      }
    } else {
      sum = Dot::add(sum, row, weights);
    }
  }

  Sums of(int g) const {
    Sums sum = sums[g][0];
    for (int i = 1; i < kChains; ++i) sum = add_sums(sum, sums[g][i]);
    return sum;
  }
};

constexpr int kGgufStreams = 4;

// Prefetches, as far ahead as the Dot Prefetches does, each line of `bytes` bytes at `from`.
template <typename Prefetches>
inline void prefetch_range_ahead(const std::byte* from, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += kLineBytes) {
    prefetch_ahead<Prefetches>(from + line);
  }
}

// Multiplies one row with one block, or with two whose parts take turns. Prefetches in each as the
// Dot Prefetches does, and by `ahead` (StreamsAhead<kGgufStreams>, NothingAhead::Share). Codes are
// multiplied in registers, where they are assembled, and do not go through memory.
template <typename Dot, Format kFormat, int kBlocks, typename Prefetches, typename Ahead>
inline void gguf_row(const BlockProducts* const (&products)[kBlocks], Ahead ahead) {
  constexpr GgufType kType = gguf_type(kFormat);
  using Codes = GgufCodes<kFormat, kType.has_unsigned_bytes()>;
  constexpr int kGroups = kType.part_groups();
  constexpr int32_t kSteps = kBlockColumns * kType.step_bytes();
  constexpr int32_t kParts = kType.depth / kGgufPart;
  constexpr int64_t kAsks = kType.stretch_bytes() / (kGgufStreams * kLineBytes) + 1;
  const OperandShape& shape = products[0]->shape;
  const std::byte* row = operand_row(*products[0], 0);
  const std::byte* row_scales = row + shape.depth_padded;
  const std::byte* row_sums = row_scales + shape.depth_padded / kType.group * 4;
  for (int32_t k = 0; k < shape.depth_padded; k += kType.depth) {
    const int64_t stretch = int64_t{k / kType.depth} * kType.stretch_bytes();
    GgufHeader<kFormat> headers[kBlocks];
    for (int b = 0; b < kBlocks; ++b) {
      const std::byte* header = products[b]->block + stretch;
      prefetch_range_ahead<Prefetches>(header, kType.header_bytes());
      headers[b].read(header);
    }
    int64_t part = stretch + kType.header_bytes();
    for (int32_t p = 0; p < kParts; ++p, part += kType.part_bytes()) {
      const int64_t asks = kAsks * (p + 1) / kParts - kAsks * p / kParts;
      typename Dot::Row operands[4];
      for (int i = 0; i < 4; ++i) operands[i] = Dot::row(row + i * 8);
      float row_scale[kGroups];
      std::conditional_t<kType.has_mins(), float, int32_t> row_sum[kGroups];  // or factors of mins
      __builtin_memcpy(row_scale, row_scales, sizeof(row_scale));
      __builtin_memcpy(row_sum, row_sums, sizeof(row_sum));
      Sums start[kGroups];
      Floats min_factors[kGroups];
      for (int g = 0; g < kGroups; ++g) {
        if constexpr (kType.has_mins()) {
          start[g] = as_sums(broadcast_word(0));
          min_factors[g] = broadcast(row_sum[g]);
        } else {
          start[g] = Dot::start(Dot::zeros(nullptr), row_sum[g]);
        }
      }
      for (int b = 0; b < kBlocks; ++b) {
        const std::byte* of_block = products[b]->block + part;
        const GgufHeader<kFormat>& header = headers[b];
        prefetch_range_ahead<Prefetches>(of_block, kGroups * kSteps);
        for (int32_t first = 0; first < kBlockColumns; first += kGgufColumns) {
          const std::byte* words = of_block + kGroups * kSteps + first * kType.bits * 4;
          for (int w = 0; w < kType.bits; ++w) {
            prefetch_ahead<Prefetches>(words + w * kGgufLine);
          }
          for (int32_t c = first; c < first + kGgufColumns; c += kLanes, words += kLanes * 4) {
            if (c / kLanes < asks) ahead.ask();
            GgufSums<Dot, kFormat> sums(start);
            read_gguf<Codes, 0, 4>(words, [&](auto eight, Words low, Words high) {
              sums.template add<eight.value>(operands[eight.value], Dot::of(low, high));
            });
            // In a register between groups: after a store to the sums, which steps and halves may
            // alias, the compiler would load these again.
            Floats total = load(products[b]->sums + c);
            for (int g = 0; g < kGroups; ++g) {
              const std::byte* steps = of_block + g * kSteps + c;
              const Floats scale = GgufSteps<kFormat>::scale(load(header.d + c), steps);
              total = plus_scaled(total, sums.of(g), row_scale[g], scale);
              if constexpr (kType.has_mins()) {
                const Floats min = GgufSteps<kFormat>::min(load(header.of_mins() + c), steps);
                total = multiply_add(min_factors[g], min, total);
              }
            }
            store(products[b]->sums + c, total);
          }
        }
      }
      row += kGgufPart;
      row_scales += kGroups * 4;
      row_sums += kGroups * 4;
    }
  }
}

// Dequantizes kSquare inputs as store/gguf_types.h defines them.
template <Format kFormat>
inline void dequantize_gguf(const SquareOfBlock& from, float* square) {
  constexpr GgufType kType = gguf_type(kFormat);
  alignas(64) std::byte codes[kGgufPart * kBlockColumns];
  for (int32_t first = 0; first < kSquare; first += kType.group) {
    const GgufPlace<kFormat> place(from.block, (from.depth + first) / kType.group);
    static_assert(kType.max_byte() <= UINT8_MAX);  // also of IQ4
    place.template expand<true>(codes);
    for (int32_t c = 0; c < kBlockColumns; c += kLanes) {
      const Floats scale = place.scale(c);
      for (int32_t j = 0; j < kType.group / 4; ++j) {
        float* to = square + (first + 4 * j) * kBlockColumns + c;
        const Words part = load_words(codes + (j * kBlockColumns + c) * 4);
        store_part(part, broadcast_word(kType.zero_byte()), scale, to);
        if constexpr (kType.has_mins()) {
          for (int i = 0; i < 4; ++i) {
            float* at = to + i * kBlockColumns;
            store(at, load(at) - place.min(c));
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace torch_mesh
