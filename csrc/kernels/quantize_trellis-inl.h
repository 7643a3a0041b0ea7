// Chooses the codes of one stream of a block, for targets that change as codes are chosen: see
// TrellisPacking. Lanes are columns.
#pragma once

#include "kernels/pack_trellis-inl.h"

namespace torch_mesh {
namespace {

// 2 * kLanes columns of the stream.
template <typename Code>
class TrellisRing {
 public:
  TrellisRing(const TrellisStream& stream, int32_t column)
      : stream_(stream),
        column_(column),
        viterbi_(*reinterpret_cast<Viterbi<Code>*>(stream.scratch)),
        predecessors_(stream.scratch + sizeof(Viterbi<Code>)) {}

  // Chooses the state in which its end and its beginning meet best.
  void begin() {
    const int32_t tail = stream_.steps < kTailSteps ? stream_.steps : kTailSteps;
    viterbi_.begin();
    advance(stream_.steps - tail, tail);
    advance(0, tail);
    uint16_t states[2 * kLanes];
    viterbi_.best(states);
    for (int32_t lane = 0; lane < 2 * kLanes; ++lane) {
      for (int32_t j = tail - 1; j >= 0; --j) back(j, lane, states[lane]);
      stream_.ring[column_ + lane] = states[lane];
      stream_.now[column_ + lane] = states[lane];
    }
  }

  // See TrellisPacking::choose.
  void choose(int32_t first, int32_t count, int32_t kept) {
    viterbi_.begin(stream_.now + column_);
    advance(first, count);
    uint16_t states[2 * kLanes];
    if (first + count == stream_.steps) {
      __builtin_memcpy(states, stream_.ring + column_, sizeof(states));
    } else {
      viterbi_.best(states);
    }
    for (int32_t lane = 0; lane < 2 * kLanes; ++lane) {
      const int32_t column = column_ + lane;
      uint16_t state = states[lane];
      for (int32_t j = count - 1; j >= kept; --j) back(j, lane, state);
      stream_.now[column] = state;
      for (int32_t j = kept - 1; j >= 0; --j) {
        const uint16_t to = state;
        const int32_t code = back(j, lane, state);
        const int32_t level = Viterbi<Code>::level(state, to) - kTrellisZero;
        const int64_t row = int64_t{first + j} * kBlockColumns;
        stream_.codes[row * kTrellisStreams + column] = static_cast<uint8_t>(code);
        stream_.values[row + column] =
            static_cast<float>(level) * scale(stream_.scales, first + j)[column];
      }
    }
  }

 private:
  const float* scale(const float* of_groups, int32_t step) const {
    return of_groups + step / stream_.group_steps * kBlockColumns;
  }

  void advance(int32_t first, int32_t count) {
    for (int32_t j = 0; j < count; ++j) {
      const int32_t step = first + j;
      const float* targets = stream_.targets + int64_t{step} * kBlockColumns + column_;
      const float* inverses = scale(stream_.inverses, step) + column_;
      Floats positions[2];
      for (int32_t i = 0; i < 2; ++i) {
        positions[i] = position_of(load(targets + i * kLanes), load(inverses + i * kLanes));
      }
      const float units[2] = {stream_.units[step], stream_.units[step]};
      viterbi_.step(positions, units, predecessors(j));
      if (j % kStepsBetween == kStepsBetween - 1) viterbi_.subtract_lowest();
    }
  }

  std::byte* predecessors(int32_t step) const {
    return predecessors_ + int64_t{step} * Costs<Code>::kWords * kLanes * 4;
  }
  int32_t back(int32_t step, int32_t lane, uint16_t& state) const {
    return Viterbi<Code>::back(predecessors(step), lane, state);
  }

  const TrellisStream& stream_;
  const int32_t column_;
  Viterbi<Code>& viterbi_;
  std::byte* predecessors_;
};

template <typename Code>
inline void begin_trellis_stream(const TrellisStream& stream) {
  for (int32_t c = 0; c < kBlockColumns; c += 2 * kLanes) TrellisRing<Code>(stream, c).begin();
}

template <typename Code>
inline void choose_trellis_codes(const TrellisStream& stream, int32_t first, int32_t count,
                                 int32_t kept) {
  for (int32_t c = 0; c < kBlockColumns; c += 2 * kLanes) {
    TrellisRing<Code>(stream, c).choose(first, count, kept);
  }
}

template <typename Code>
inline void store_trellis_codes(const uint8_t* codes, const PackedMatrix& matrix, std::byte* to) {
  const TrellisBlock<Code> block(to, matrix.group_size, matrix.depth_padded);
  for (int32_t c = 0; c < kBlockColumns; c += kLanes) {
    for (int32_t u = 0; u < block.units; ++u) {
      store_unit<Code>(codes + int64_t{u} * Code::kUnitDepth * kBlockColumns + c, kBlockColumns,
                       to + (block.words(u) - block.block) + block.to_column(c));
    }
  }
}

template <typename Code>
constexpr TrellisPacking trellis_packing() {
  return {trellis_scratch<Code>, pack_trellis_block<Code>, begin_trellis_stream<Code>,
          choose_trellis_codes<Code>, store_trellis_codes<Code>};
}

}  // namespace
}  // namespace torch_mesh
