// Packs one block of 64 columns into codes of a trellis. Viterbi's algorithm finds the sequence of
// codes whose levels are nearest to a stream's weights. Lanes are streams, and their costs are
// integers, so that every target packs the same bits.
#pragma once

#include "kernels/pack_group-inl.h"
#include "kernels/trellis-inl.h"

namespace torch_mesh {
namespace {

// A state is reached from kCodes others, its predecessors i. These share all their successors: they
// are a family.
constexpr int32_t trellis_source(Tcq2, int32_t family, int32_t i) { return i << 8 | family; }
constexpr int32_t trellis_source(Tcq3, int32_t family, int32_t i) {
  return i >> 1 << 7 | family >> 2 << 3 | (i & 1) << 2 | (family & 3);
}
constexpr int32_t predecessor(Tcq2, int32_t state) { return state >> 8; }
constexpr int32_t predecessor(Tcq3, int32_t state) { return state >> 7 << 1 | (state >> 2 & 1); }

// Costs have 16 bits. The lowest kBits name the predecessor i that a state has been reached from:
// one minimum then chooses both. Distances above kMaxDistance units count as kMaxDistance, so that
// no path costs kMaxCost more than another for long.
template <typename Code>
struct Costs {
  static constexpr int32_t kBits = Code::kCodes == 4 ? 2 : 3;
  static constexpr int32_t kSlot = Code::kCodes == 4 ? 2 : 4;  // bits of a predecessor that is kept
  static constexpr int32_t kSlots = 16 / kSlot;
  static constexpr int32_t kWords = Code::kStates / kSlots;  // of predecessors, in a step
  static constexpr uint32_t kMaxDistance = 2047;
  static constexpr uint32_t kMaxCost = (0xffffu >> kBits) - kMaxDistance;
};
// The levels were made for Gaussian weights of this root mean square.
constexpr float kRootMeanSquare = 11.0f;
constexpr int32_t kLevels = 64;
constexpr int32_t kStepsBetween = 4;  // steps between subtractions of the least cost
constexpr int32_t kTailSteps = 16;

inline Words both_halves(uint32_t value) { return broadcast_word(value << 16 | value); }

// All steps between states, in the order in which they are computed.
template <typename Code>
struct Trellis {
  static constexpr int32_t kFamilies = Code::kStates / Code::kCodes;
  uint16_t sources[kFamilies][Code::kCodes];
  uint16_t targets[kFamilies][Code::kCodes];
  uint8_t levels[kFamilies][Code::kCodes][Code::kCodes];  // by code, then by predecessor
  // By target: its place in `targets`.
  uint16_t places[Code::kStates];

  constexpr Trellis() : sources{}, targets{}, levels{}, places{} {
    for (int32_t f = 0; f < kFamilies; ++f) {
      for (int32_t i = 0; i < Code::kCodes; ++i) {
        const int32_t source = trellis_source(Code{}, f, i);
        sources[f][i] = static_cast<uint16_t>(source);
        for (int32_t code = 0; code < Code::kCodes; ++code) {
          const int32_t target = Code::next(source, code);
          targets[f][code] = static_cast<uint16_t>(target);
          places[target] = static_cast<uint16_t>(f * Code::kCodes + code);
          levels[f][code][i] = static_cast<uint8_t>(Code::level(source, code));
        }
      }
    }
  }
};
template <typename Code>
constexpr Trellis<Code> kTrellis;

// Returns the factor from a group's weights, of which `count` are no padding, to levels. The scale
// is chosen later, from the codes.
inline Floats provisional_inverse(const Columns& columns, int32_t count) {
  Floats squares = broadcast(0.0f);
  for (int32_t i = 0; i < columns.depth; ++i) {
    squares = multiply_add(columns.row(i), columns.row(i), squares);
  }
  alignas(64) float each[kLanes];
  store(each, squares);
  for (float& value : each) {
    value = value > 0 ? kRootMeanSquare / __builtin_sqrtf(value / static_cast<float>(count)) : 0.0f;
  }
  return load(each);
}

// Returns the position of a weight among the levels.
inline Floats position_of(Floats weight, Floats inverse) {
  const Floats position =
      multiply_add(weight, inverse, broadcast(static_cast<float>(kTrellisZero)));
  // Only a little beyond the levels: further out all levels would be equally far.
  return minimum(maximum(position, broadcast(-8.0f)), broadcast(kLevels + 7.0f));
}

// Two sets of kLanes streams each, in the lower and upper halves of words.
template <typename Code>
struct Viterbi {
  using Cost = Costs<Code>;

  static constexpr int64_t kCostBytes = int64_t{Code::kStates} * kLanes * 4;
  alignas(64) std::byte costs[2][kCostBytes];  // of this step and of the next one, in turn
  alignas(64) std::byte distances[kLevels * kLanes * 4];
  int32_t now;

  const std::byte* present() const { return costs[now]; }
  std::byte* present() { return costs[now]; }

  static Words at(const std::byte* words, int32_t index) {
    return load_words(words + int64_t{index} * kLanes * 4);
  }
  static void put(std::byte* words, int32_t index, Words value) {
    store_words(words + int64_t{index} * kLanes * 4, value);
  }

  // All streams begin in any state.
  void begin() {
    now = 0;
    for (int32_t s = 0; s < Code::kStates; ++s) put(present(), s, first_cost(s, 0));
  }
  // Each stream begins in a state of its own: [2][kLanes].
  void begin(const uint16_t* states) {
    now = 0;
    for (int32_t s = 0; s < Code::kStates; ++s) {
      put(present(), s, first_cost(s, Cost::kMaxCost));
    }
    for (int32_t lane = 0; lane < 2 * kLanes; ++lane) {
      const uint16_t none = static_cast<uint16_t>(predecessor(Code{}, states[lane]));
      __builtin_memcpy(present() + of_lane(states[lane], lane), &none, sizeof(none));
    }
  }

  // `positions` are those of the streams' next weights among the levels. `units` are the costs of a
  // squared distance of one level in each set, 0 for padding. Writes Cost::kWords words of
  // predecessors.
  void step(const Floats (&positions)[2], const float (&units)[2], std::byte* predecessors) {
    measure(positions, units);
    for (int32_t w = 0; w < Cost::kWords; ++w) {
      const int32_t family = w * Cost::kSlots / Code::kCodes;
      Words kept = broadcast_word(0);
      if constexpr (Cost::kSlots >= Code::kCodes) {
        for (int32_t f = Cost::kSlots / Code::kCodes - 1; f >= 0; --f) {
          kept = advance<0, Code::kCodes>(family + f, kept);
        }
      } else if (w % 2 == 0) {
        kept = advance<0, Cost::kSlots>(family, kept);
      } else {
        kept = advance<Cost::kSlots, Code::kCodes>(family, kept);
      }
      put(predecessors, w, kept);
    }
    now = 1 - now;
  }

  void subtract_lowest() {
    Words lowest = at(present(), 0);
    for (int32_t s = 1; s < Code::kStates; ++s) lowest = minimum_uint16(lowest, at(present(), s));
    lowest = lowest & both_halves(0xffffu << Cost::kBits & 0xffff);
    for (int32_t s = 0; s < Code::kStates; ++s) {
      put(present(), s, subtract_words(at(present(), s), lowest));
    }
  }

  // Writes each stream's state of least cost.
  void best(uint16_t* states) const {
    constexpr int32_t kRun = 32;
    alignas(64) std::byte run_lowest[Code::kStates / kRun * kLanes * 4];  // of runs of states
    Words lowest = both_halves(0xffff);
    for (int32_t run = 0; run < Code::kStates / kRun; ++run) {
      Words own = at(present(), run * kRun);
      for (int32_t s = 1; s < kRun; ++s) {
        own = minimum_uint16(own, at(present(), run * kRun + s));
      }
      put(run_lowest, run, own);
      lowest = minimum_uint16(lowest, own);
    }
    alignas(64) std::byte of_all[kLanes * 4];
    put(of_all, 0, lowest);
    for (int32_t lane = 0; lane < 2 * kLanes; ++lane) {
      const int32_t cost = cost_of(of_all, 0, lane);
      int32_t run = 0;
      while (cost_of(run_lowest, run, lane) != cost) ++run;
      int32_t s = run * kRun;
      while (cost_of(present(), s, lane) != cost) ++s;
      states[lane] = static_cast<uint16_t>(s);
    }
  }

  // Returns the code of the step that led to `state`, and sets `state` to the one before it.
  static int32_t back(const std::byte* predecessors, int32_t lane, uint16_t& state) {
    const int32_t place = kTrellis<Code>.places[state];
    uint16_t kept;
    __builtin_memcpy(&kept, predecessors + of_lane(place / Cost::kSlots, lane), sizeof(kept));
    const int32_t i = kept >> place % Cost::kSlots * Cost::kSlot & (Code::kCodes - 1);
    state = kTrellis<Code>.sources[place / Code::kCodes][i];
    return place % Code::kCodes;
  }
  // The level of the step from one state to the next. (Code::level() at run time would need data
  // with external linkage.)
  static int32_t level(uint16_t from, uint16_t to) {
    const int32_t place = kTrellis<Code>.places[to];
    const auto& levels = kTrellis<Code>.levels[place / Code::kCodes][place % Code::kCodes];
    return levels[predecessor(Code{}, from)];
  }

 private:
  static Words first_cost(int32_t state, uint32_t cost) {
    return both_halves(cost << Cost::kBits | static_cast<uint32_t>(predecessor(Code{}, state)));
  }
  // The place in bytes of a lane of a word of lanes; lanes of the second set are the upper halves.
  static int64_t of_lane(int32_t word, int32_t lane) {
    return (int64_t{word} * kLanes + lane % kLanes) * 4 + lane / kLanes * 2;
  }
  static int32_t cost_of(const std::byte* words, int32_t index, int32_t lane) {
    uint16_t cost;
    __builtin_memcpy(&cost, words + of_lane(index, lane), sizeof(cost));
    return cost >> Cost::kBits;
  }

  void measure(const Floats (&positions)[2], const float (&units)[2]) {
    const Floats limit = broadcast(static_cast<float>(Cost::kMaxDistance));
    for (int32_t level = 0; level < kLevels; ++level) {
      Words both[2];
      for (int i = 0; i < 2; ++i) {
        const Floats apart = positions[i] - broadcast(static_cast<float>(level));
        both[i] = to_integers(minimum(apart * apart * broadcast(units[i]), limit));
      }
      put(distances, level, shift_left<Cost::kBits>(both[0] | shift_left<16>(both[1])));
    }
  }

  // Computes codes [kFirst, kEnd) of a family. Returns `kept` with their predecessors below those
  // in it.
  template <int32_t kFirst, int32_t kEnd>
  Words advance(int32_t family, Words kept) {
    const Trellis<Code>& trellis = kTrellis<Code>;
    const Words number = both_halves(Code::kCodes - 1);
    Words from[Code::kCodes];
    for (int32_t i = 0; i < Code::kCodes; ++i) from[i] = at(present(), trellis.sources[family][i]);
    for (int32_t code = kEnd - 1; code >= kFirst; --code) {
      const uint8_t* levels = trellis.levels[family][code];
      Words lowest = add_int16(from[0], at(distances, levels[0]));
      for (int32_t i = 1; i < Code::kCodes; ++i) {
        lowest = minimum_uint16(lowest, add_int16(from[i], at(distances, levels[i])));
      }
      kept = shift_left<Cost::kSlot>(kept) | (lowest & number);
      const int32_t target = trellis.targets[family][code];
      const Words limit = both_halves(Cost::kMaxCost << Cost::kBits | number_of(target));
      // Clears the lowest bits, which name the predecessor; the target's own number replaces them.
      const Words cost = subtract_words(lowest, lowest & number);
      put(costs[1 - now], target, minimum_uint16(cost | both_halves(number_of(target)), limit));
    }
    return kept;
  }
  static uint32_t number_of(int32_t state) {
    return static_cast<uint32_t>(predecessor(Code{}, state));
  }
};

// Returns kBits bits, from bit kFrom on, of kCount codes of each stream, in the stream's byte.
// `codes` are those of kLanes columns, `stride` from one input to the next.
template <int kBits, int kCount, int kFrom>
inline Words word_of_codes(const uint8_t* codes, int32_t stride) {
  Words word = broadcast_word(0);
  for (int32_t j = kCount - 1; j >= 0; --j) {
    word = shift_left<kBits>(word);
    for (int32_t stream = 0; stream < kTrellisStreams; ++stream) {
      Words code = load_bytes(codes + (j * kTrellisStreams + stream) * stride);
      if (kFrom == 1) code = shift_right<1>(code);
      word = word | byte_of_word(code & broadcast_word((1u << kBits) - 1), stream);
    }
  }
  return word;
}
template <typename Code>
inline void store_unit(const uint8_t* codes, int32_t stride, std::byte* words) {
  if constexpr (Code::kUnitWords == 1) {
    store_words(words, word_of_codes<2, 4, 0>(codes, stride));
  } else {
    store_words(words, word_of_codes<2, 4, 1>(codes, stride));
    store_words(words + kTrellisLine, word_of_codes<2, 4, 1>(codes + 16 * stride, stride));
    store_words(words + 2 * kTrellisLine, word_of_codes<1, 8, 0>(codes, stride));
  }
}

// Bytes of scratch for TrellisColumns: the costs, [steps][Costs::kWords] words of predecessors,
// [depth_padded] words of positions, as many bytes of codes.
template <typename Code>
inline int64_t trellis_scratch(int32_t depth_padded) {
  const int64_t steps = depth_padded / kTrellisStreams;
  return static_cast<int64_t>(sizeof(Viterbi<Code>)) + steps * Costs<Code>::kWords * kLanes * 4 +
         int64_t{depth_padded} * kLanes * 5;
}

// kLanes columns of a block.
template <typename Code>
class TrellisColumns {
 public:
  // `panel` is [depth_padded][kBlockColumns].
  TrellisColumns(const float* panel, int32_t depth, const PackedMatrix& matrix, std::byte* scratch)
      : depth_(depth),
        padded_(matrix.depth_padded),
        group_(matrix.group_size),
        viterbi_(*reinterpret_cast<Viterbi<Code>*>(scratch)),
        predecessors_(scratch + sizeof(Viterbi<Code>)),
        positions_(reinterpret_cast<float*>(predecessors_ + int64_t{padded_} / kTrellisStreams *
                                                                Costs<Code>::kWords * kLanes * 4)),
        codes_(reinterpret_cast<uint8_t*>(positions_ + int64_t{padded_} * kLanes)) {
    for (int32_t k = 0; k < padded_; k += group_) place(panel + k * kBlockColumns, k);
  }

  void quantize() {
    for (int32_t stream = 0; stream < kTrellisStreams / 2; ++stream) {
      uint16_t ends[2 * kLanes];
      const int32_t steps = padded_ / kTrellisStreams;
      const int32_t tail = steps < kTailSteps ? steps : kTailSteps;
      // The state in which the end and the beginning of a stream, which is a ring, meet best.
      viterbi_.begin();
      for (int32_t j = 0; j < tail; ++j) step(stream, steps - tail + j, j);
      for (int32_t j = 0; j < tail; ++j) step(stream, j, j);
      viterbi_.best(ends);
      for (int32_t lane = 0; lane < 2 * kLanes; ++lane) {
        for (int32_t j = tail - 1; j >= 0; --j) back(j, lane, ends[lane]);
      }
      viterbi_.begin(ends);
      for (int32_t j = 0; j < steps; ++j) step(stream, j, j);
      for (int32_t lane = 0; lane < 2 * kLanes; ++lane) {
        uint16_t state = ends[lane];
        const int32_t own = stream + lane / kLanes * kTrellisStreams / 2;
        for (int32_t j = steps - 1; j >= 0; --j) {
          const int32_t code = back(j, lane, state);
          codes_[(j * kTrellisStreams + own) * kLanes + lane % kLanes] = static_cast<uint8_t>(code);
        }
      }
    }
  }

  // Writes the codes, and the least-squares scales for them, to the block.
  void store(const TrellisBlock<Code>& block, int32_t column, const float* panel,
             std::byte* to) const {
    for (int32_t u = 0; u < block.units; ++u) {
      store_unit<Code>(codes_ + int64_t{u} * Code::kUnitDepth * kLanes, kLanes,
                       to + (block.words(u) - block.block) + block.to_column(column));
    }
    for (int32_t k = 0; k < padded_; k += group_) {
      alignas(64) std::byte levels[kMaxGroup * kBlockColumns];
      expand_columns(block, k, column, levels);
      const Columns columns(panel + k * kBlockColumns, group_);
      Floats xq = broadcast(0.0f), qq = broadcast(0.0f);
      for (int32_t i = 0; i < counted(k); ++i) {
        const Words words = load_words(levels + i / 4 * kLanes * 4);
        const Words level = byte_at(words, i % 4);
        const Floats q = words_to_floats(subtract_words(level, broadcast_word(kTrellisZero)));
        xq = multiply_add(columns.row(i), q, xq);
        qq = multiply_add(q, q, qq);
      }
      // In a group without weights all levels may be zero.
      const Floats scale = select(less(broadcast(0.0f), qq), xq / qq, broadcast(0.0f));
      store_scale(to + (block.scales(k / group_) - block.block), column, columns, scale);
    }
  }

 private:
  // Weights of the group that begins at k, without padding.
  int32_t counted(int32_t k) const {
    const int32_t left = depth_ > k ? depth_ - k : 0;
    return left < group_ ? left : group_;
  }

  void place(const float* panel, int32_t k) {
    const Columns columns(panel, group_);
    const Floats inverse = provisional_inverse(columns, counted(k));
    for (int32_t i = 0; i < group_; ++i) {
      torch_mesh::store(positions_ + (k + i) * kLanes, position_of(columns.row(i), inverse));
    }
  }

  std::byte* predecessors(int32_t step) const {
    return predecessors_ + int64_t{step} * Costs<Code>::kWords * kLanes * 4;
  }
  void step(int32_t stream, int32_t j, int32_t kept) {
    Floats positions[2];
    float units[2];
    for (int32_t i = 0; i < 2; ++i) {
      const int32_t k = j * kTrellisStreams + stream + i * kTrellisStreams / 2;
      positions[i] = load(positions_ + k * kLanes);
      units[i] = k < depth_ ? kTrellisDistance : 0.0f;
    }
    viterbi_.step(positions, units, predecessors(kept));
    if (j % kStepsBetween == kStepsBetween - 1) viterbi_.subtract_lowest();
  }
  int32_t back(int32_t kept, int32_t lane, uint16_t& state) const {
    return Viterbi<Code>::back(predecessors(kept), lane, state);
  }

  static Words byte_at(Words words, int32_t byte) {
    switch (byte) {
      case 0:
        return words & broadcast_word(0xff);
      case 1:
        return shift_right<8>(words) & broadcast_word(0xff);
      case 2:
        return shift_right<16>(words) & broadcast_word(0xff);
      default:
        return shift_right<24>(words);
    }
  }
  // [group / 4][kLanes]
  void expand_columns(const TrellisBlock<Code>& block, int32_t k, int32_t column,
                      std::byte* levels) const {
    const int32_t first = k / Code::kUnitDepth;
    TrellisReader<Code> read(TrellisPlace<Code>(block, first), block.to_column(column));
    for (int32_t u = first; u < first + group_ / Code::kUnitDepth; ++u) {
      read(block.words(u) + block.to_column(column), [levels](auto pair, Words low, Words high) {
        store_words(levels + pair.value * 2 * kLanes * 4, low);
        store_words(levels + (pair.value * 2 + 1) * kLanes * 4, high);
      });
      levels += Code::kUnitDepth / 4 * kLanes * 4;
    }
  }

  int32_t depth_, padded_, group_;
  Viterbi<Code>& viterbi_;
  std::byte* predecessors_;
  float* positions_;
  uint8_t* codes_;
};

template <typename Code>
inline void pack_trellis_block(const float* panel, int32_t depth, const PackedMatrix& matrix,
                               std::byte* scratch, std::byte* to) {
  const TrellisBlock<Code> block(to, matrix.group_size, matrix.depth_padded);
  for (int32_t c = 0; c < kBlockColumns; c += kLanes) {
    TrellisColumns<Code> columns(panel + c, depth, matrix, scratch);
    columns.quantize();
    columns.store(block, c, panel + c, to);
  }
}

}  // namespace
}  // namespace torch_mesh
