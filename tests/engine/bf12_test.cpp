// bf12 against bf16: the same weights, and bit-identical results computed from them.
#include "store/bf12.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "kernels/exact_products.h"
#include "kernels_fixture.h"

namespace torch_mesh::testing {
namespace {

using Patterns = std::vector<uint16_t>;  // [columns][depth]

constexpr int32_t kTile = 64;

Bytes pack(const PackedMatrix& matrix, const Patterns& weights) {
  Bytes blocks(matrix.bytes());
  const MatrixView view{weights.data(), ScalarType::kBf16, matrix.depth, 1};
  pack_blocks(matrix, view, 0, matrix.blocks, blocks.data());
  return blocks;
}

Patterns unpack(const PackedMatrix& matrix, const Bytes& blocks) {
  std::vector<float> floats(static_cast<size_t>(matrix.columns) * matrix.depth);
  unpack_blocks(matrix, blocks.data(), floats.data());
  Patterns patterns(floats.size());
  for (size_t i = 0; i < floats.size(); ++i) {
    uint32_t bits;
    std::memcpy(&bits, &floats[i], sizeof(bits));
    EXPECT_EQ(bits & 0xffff, 0u);
    patterns[i] = static_cast<uint16_t>(bits >> 16);
  }
  return patterns;
}

void expect_the_same(const PackedMatrix& matrix, const Patterns& weights) {
  const Bytes blocks = pack(matrix, weights);
  EXPECT_TRUE(unpack(matrix, blocks) == weights);
  alignas(64) float square[kTile * kTile];
  for (const KernelTable* table : all_tables()) {
    SCOPED_TRACE(table->name);
    for (int32_t b = 0; b < matrix.blocks; ++b) {
      for (int32_t k = 0; k < matrix.depth_padded; k += kTile) {
        table->of(matrix.format)
            .dequantize({blocks.data() + b * matrix.block_bytes, 0, matrix.depth_padded, k},
                        square);
        int32_t different = 0;
        for (int32_t i = 0; i < kTile * kTile; ++i) {
          const int32_t column = b * kTile + i % kTile, depth = k + i / kTile;
          const bool padding = column >= matrix.columns || depth >= matrix.depth;
          const uint32_t expected =
              padding ? 0 : uint32_t{weights[int64_t{column} * matrix.depth + depth]} << 16;
          uint32_t bits;
          std::memcpy(&bits, &square[i], sizeof(bits));
          different += bits != expected;
        }
        EXPECT_EQ(different, 0);
      }
    }
  }
}

// Random bit patterns with at most kBf12Names distinct upper bytes in each tile, so that the tile's
// table holds them all.
Patterns patterns_of(const PackedMatrix& matrix, Random& random) {
  Patterns weights(static_cast<size_t>(matrix.columns) * matrix.depth);
  const int32_t across = (matrix.depth + kTile - 1) / kTile;
  std::vector<uint8_t> uppers(static_cast<size_t>(matrix.blocks) * across * kBf12Names);
  for (uint8_t& upper : uppers) upper = static_cast<uint8_t>(random.below(256));
  for (size_t i = 0; i < uppers.size(); i += kBf12Names) uppers[i] = 0;  // padding has it
  for (int32_t column = 0; column < matrix.columns; ++column) {
    for (int32_t k = 0; k < matrix.depth; ++k) {
      const int32_t tile = column / kTile * across + k / kTile;
      const uint8_t upper =
          uppers[static_cast<size_t>(tile * kBf12Names + random.below(kBf12Names))];
      weights[static_cast<size_t>(column) * matrix.depth + k] =
          static_cast<uint16_t>(upper << 8 | random.below(256));
    }
  }
  return weights;
}

// Every bit pattern, including infinities, NaN payloads, subnormals and both zeros.
TEST(Bf12, HoldsEveryPattern) {
  for (const Format format : {Format::kBf12, Format::kBf16}) {
    const PackedMatrix matrix = PackedMatrix::make(format, 0, 4 * kTile, 4 * kTile);
    Patterns weights(1 << 16);
    int32_t next = 0;
    for (int32_t tile = 0; tile < 16; ++tile) {
      for (int32_t i = 0; i < kTile * kTile; ++i, ++next) {
        const int32_t column = tile / 4 * kTile + i % kTile, k = tile % 4 * kTile + i / kTile;
        weights[static_cast<size_t>(column * matrix.depth + k)] = static_cast<uint16_t>(next);
      }
    }
    expect_the_same(matrix, weights);
  }
}

TEST(Bf12, HoldsAnyPatternsOfFewUpperBytes) {
  Random random;
  for (const auto& [columns, depth] :
       {std::pair{1, 1}, {64, 64}, {100, 128}, {100, 130}, {192, 200}}) {
    const PackedMatrix matrix = PackedMatrix::make(Format::kBf12, 0, columns, depth);
    expect_the_same(matrix, patterns_of(matrix, random));
  }
}

// As many exceptions as a block has room for, in one tile or spread over all, then one more.
TEST(Bf12, HoldsAsManyExceptionsAsABlockHasRoomFor) {
  Random random;
  const int32_t tiles = 3, room = tiles * kBf12Exceptions;
  const PackedMatrix matrix = PackedMatrix::make(Format::kBf12, 0, kTile, tiles * kTile);
  for (const bool together : {false, true}) {
    Patterns weights(static_cast<size_t>(kTile) * matrix.depth);
    for (uint16_t& weight : weights) {
      weight = static_cast<uint16_t>((0x30 + random.below(kBf12Names)) << 8 | random.below(256));
    }
    const int32_t depth = together ? kTile : matrix.depth;
    std::vector<int32_t> places = random.permutation(kTile * depth);
    const auto at = [&](int32_t i) -> uint16_t& {
      const int32_t place = places[static_cast<size_t>(i)];
      return weights[static_cast<size_t>(place / depth * matrix.depth + place % depth)];
    };
    for (int32_t i = 0; i < room; ++i) {
      at(i) = static_cast<uint16_t>((0x80 + random.below(100)) << 8 | random.below(256));
    }
    expect_the_same(matrix, weights);
    at(room) = 0xc0c0;
    try {
      pack(matrix, weights);
      FAIL() << "packed what there is no room for";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
      EXPECT_NE(std::string(error.what()).find("Use bf16"), std::string::npos);
    }
  }
}

// A block with damaged exceptions never makes the reader read outside the block or write outside a
// tile.
TEST(Bf12, ReadsDamagedBlocksWithinTheirBounds) {
  Random random;
  const PackedMatrix matrix = PackedMatrix::make(Format::kBf12, 0, kTile, 3 * kTile);
  for (int32_t round = 0; round < 20; ++round) {
    Bytes blocks(matrix.bytes());
    for (int64_t i = 0; i < blocks.size(); ++i) {
      blocks.data()[i] = static_cast<std::byte>(random.below(256));
    }
    unpack(matrix, blocks);
    Bytes rows(int64_t{9} * matrix.depth_padded * 2, 0), sums(9 * kTile * 4),
        square(kTile * kTile * 4);
    const OperandShape shape{Format::kBf12, 0, matrix.depth_padded, matrix.depth_padded * 2,
                             matrix.block_bytes};
    for (const KernelTable* table : all_tables()) {
      const FormatKernels& kernels = table->of(Format::kBf12);
      for (const int32_t count : {1, 2, 9}) {
        const BlockProducts products{blocks.data(),
                                     shape,
                                     {rows.data(), nullptr, count},
                                     reinterpret_cast<float*>(sums.data())};
        BlockProducts second = products;
        second.sums += kTile;
        kernels.products(products);
        if (count == 1 && kernels.pair != nullptr) kernels.pair(products, second);
        if (kernels.panels != nullptr) kernels.panels(products);
      }
      kernels.dequantize({blocks.data(), 0, matrix.depth_padded, kTile},
                         reinterpret_cast<float*>(square.data()));
    }
  }
}

TEST(Bf12, HasAboutTwelveBitsForEachWeight) {
  const PackedMatrix matrix = PackedMatrix::make(Format::kBf12, 0, 2048, 768);
  EXPECT_EQ(matrix.bytes() * 8, int64_t{2048} * 768 * 97 / 8);
}

// Puts up to `exceptions` weights with upper bytes of their own into each tile, beside 14 bytes of
// the other weights and that of padding: at least `exceptions` - 2 have no place in its table,
// unless they meet. A matrix is [outputs][inputs].
void set_exceptions(std::vector<float>& matrix, int32_t inputs, int32_t exceptions,
                    Random& random) {
  for (float& w : matrix) w = std::copysign(std::ldexp(1 + std::abs(w), -2 * random.below(7)), w);
  const auto outputs = static_cast<int32_t>(std::ssize(matrix)) / inputs;
  for (int32_t row = 0; row < outputs; row += 64) {
    for (int32_t column = 0; column < inputs; column += 64) {
      for (int32_t i = 0; i < exceptions; ++i) {
        const int32_t output = row + random.below(std::min(64, outputs - row));
        const int32_t input = column + random.below(std::min(64, inputs - column));
        matrix[static_cast<size_t>(output) * inputs + input] = std::ldexp(1.0f, -40 - 4 * i);
      }
    }
  }
}

// Every table packs the same record, exceptions included.
TEST(Bf12, PacksTheSameBitsEverywhere) {
  Random random;
  const Shape shape{Format::kBf12, 0, 130, 70, true, true};
  Weights weights(shape.layout(), random);
  set_exceptions(weights.gate, shape.hidden, kBf12Exceptions, random);
  set_exceptions(weights.up, shape.hidden, kBf12Exceptions, random);
  set_exceptions(weights.down, shape.intermediate, kBf12Exceptions, random);
  const Bytes record = weights.pack(kernel_table());
  for (const KernelTable* table : all_tables()) EXPECT_TRUE(weights.pack(*table) == record);
}

// Rows of whole pairs are packed as they are; others are rounded from floats.
TEST(Bf12, PacksPairsOfBf16AsOtherViews) {
  Random random;
  constexpr int32_t kHidden = 3 * kTile, kIntermediate = 2 * kTile;
  for (const Format format : {Format::kBf12, Format::kBf16}) {
    const RecordLayout layout = Shape{format, 0, kHidden, kIntermediate, false}.layout();
    Patterns up = patterns_of(layout.gate_up, random);
    const Patterns down = patterns_of(layout.down, random);
    for (int32_t i = 0; i < kBf12Exceptions; ++i) {
      up[static_cast<size_t>(i) * 199] = static_cast<uint16_t>((0x40 + i) << 8 | i);
    }
    // Rows that begin `stride` apart, from element `offset` on.
    const auto pack = [&](const KernelTable& table, int32_t stride, int32_t offset) {
      Patterns apart(static_cast<size_t>(stride) * kIntermediate + offset, 0x7f81);
      for (int32_t row = 0; row < kIntermediate; ++row) {
        std::copy_n(up.data() + row * kHidden, kHidden, apart.data() + offset + row * stride);
      }
      const MatrixView view{apart.data() + offset, ScalarType::kBf16, stride, 1};
      Bytes record(layout.bytes);
      pack_record(layout, {.up = view, .down = {down.data(), ScalarType::kBf16, kIntermediate, 1}},
                  record.data(), table);
      return record;
    };
    const Bytes expected = pack(kScalarTable, kHidden + 1, 0);
    for (const KernelTable* table : all_tables()) {
      for (const int32_t stride : {kHidden, kHidden + 1, kHidden + 2}) {
        for (const int32_t offset : {0, 1, 2}) {
          EXPECT_TRUE(pack(*table, stride, offset) == expected)
              << table->name << ' ' << format_name(format) << ' ' << stride << ' ' << offset;
        }
      }
    }
  }
}

// Weights with and without exceptions, in records of equal value in both formats.
TEST(Bf12, ProductsHaveTheBitsOfBf16) {
  Random random;
  for (const int32_t exceptions : {0, 4, kBf12Exceptions}) {
    for (const auto& [hidden, intermediate] : {std::pair{200, 100}, {65, 321}, {2112, 64}}) {
      Shape shape{Format::kBf12, 0, hidden, intermediate, hidden != 65, true};
      Shape plain = shape;
      plain.format = Format::kBf16;
      Weights weights(shape.layout(), random), same(plain.layout(), random);
      set_exceptions(weights.gate, hidden, exceptions, random);
      set_exceptions(weights.up, hidden, exceptions, random);
      set_exceptions(weights.down, intermediate, exceptions, random);
      same.gate = weights.gate, same.up = weights.up, same.down = weights.down;
      same.gate_bias = weights.gate_bias, same.up_bias = weights.up_bias;
      same.down_bias = weights.down_bias;
      const Bytes record = weights.pack(kernel_table()), reference = same.pack(kernel_table());
      for (const int32_t count : {1, 2, 3, 5, 8, 17, 70}) {
        SCOPED_TRACE(name_of(shape) + " rows " + std::to_string(count));
        const Rows rows(shape.layout(), count, random);
        for (const KernelTable* table : all_tables()) {
          SCOPED_TRACE(table->name);
          EXPECT_TRUE(same_bits(run_ffn(*table, shape, record, rows),
                                run_ffn(*table, plain, reference, rows)));
          EXPECT_TRUE(same_bits(run_ffn(*table, shape, record, rows, for_few_rows({})),
                                run_ffn(*table, plain, reference, rows, for_few_rows({}))));
        }
      }
    }
  }
}

}  // namespace
}  // namespace torch_mesh::testing
