// Trellis-coded weights (docs/decisions/0054). A weight depends on its own code of two or three
// bits and on the codes before it, so that it has more levels than its code alone could name.
//
// The inputs k = 4 j + s of a column are its stream s, one of four, with a code for each j. In tcq2
// a code n has two bits, and
//     L(j) = n(j - 1) + 4 n(j)
//     weight(j) = scale * (kFirst[L(j) ^ L(j - 4)] + kSecond[L(j - 2)] - kTrellisZero)
// In tcq3 a code has two bits t and one bit h, and
//     T(j) = t(j - 1) + 4 t(j)
//     H(j) = h(j - 3) + 2 h(j - 2) + 4 h(j - 1) + 8 h(j)
//     weight(j) = scale * (kFirst[T(j)] + kSecond[H(j) ^ T(j - 2)] - kTrellisZero)
// Before a stream's first code come its last ones, those of padding included (tail-biting), so that
// no weight has fewer levels than others.
//
// A look-up in both tables of 16 bytes takes two byte shuffles. No sum exceeds 63, so that two
// products with an activation of at most 127 fit 16 bits. tools/trellis_tables.py makes such
// tables: Lloyd's algorithm for Gaussian weights, rounded.
#pragma once

#include <cstdint>

#include "store/record.h"

namespace torch_mesh {

inline constexpr int32_t kTrellisZero = 32;
inline constexpr int32_t kTrellisStreams = 4;

// A window holds all codes that a weight depends on, the newest in the lowest bits; a step shifts a
// code in. The state is the window without its newest code.
struct Tcq2 {
  static constexpr int32_t kCodes = 4;
  static constexpr int32_t kStates = 1024;   // five codes
  static constexpr int32_t kUnitDepth = 16;  // inputs of a column in kUnitWords words
  static constexpr int32_t kUnitWords = 1;
  alignas(16) static constexpr uint8_t kFirst[16] = {26, 23, 12, 17, 12, 32, 38, 21,
                                                     16, 21, 32, 8,  23, 14, 28, 1};
  alignas(16) static constexpr uint8_t kSecond[16] = {25, 12, 17, 18, 10, 3, 8,  14,
                                                      5,  12, 17, 8,  2,  0, 14, 22};

  static constexpr int32_t next(int32_t state, int32_t code) {
    return (state << 2 | code) & (kStates - 1);
  }
  static constexpr int32_t level(int32_t state, int32_t code) {
    const int32_t window = state << 2 | code;
    return kFirst[pair(window) ^ pair(window >> 8)] + kSecond[pair(window >> 4)];
  }
  // n(j - 1) + 4 n(j) of the lowest two codes, n(j) being the newest.
  static constexpr int32_t pair(int32_t codes) { return (codes & 3) << 2 | (codes >> 2 & 3); }
};

struct Tcq3 {
  static constexpr int32_t kCodes = 8;       // t * 2 + h
  static constexpr int32_t kStates = 512;    // three t, then three h
  static constexpr int32_t kUnitDepth = 32;  // two words of t, one of h
  static constexpr int32_t kUnitWords = 3;
  alignas(16) static constexpr uint8_t kFirst[16] = {22, 23, 13, 9,  30, 13, 5,  22,
                                                     13, 32, 29, 15, 2,  17, 23, 36};
  alignas(16) static constexpr uint8_t kSecond[16] = {12, 9,  0, 18, 26, 8,  23, 13,
                                                      7,  18, 3, 12, 20, 15, 14, 6};

  static constexpr int32_t next(int32_t state, int32_t code) {
    const int32_t t = (state >> 3 << 2 | code >> 1) & 63;
    const int32_t h = (state << 1 | (code & 1)) & 7;
    return t << 3 | h;
  }
  static constexpr int32_t level(int32_t state, int32_t code) {
    const int32_t t = state >> 3 << 2 | code >> 1;
    const int32_t h = (state & 7) << 1 | (code & 1);
    const int32_t turned = (h & 1) << 3 | (h & 2) << 1 | (h & 4) >> 1 | h >> 3;
    return kFirst[Tcq2::pair(t)] + kSecond[turned ^ Tcq2::pair(t >> 4)];
  }
};

}  // namespace torch_mesh
