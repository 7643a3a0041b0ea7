#include "testing/record_sum.h"

#include <algorithm>
#include <atomic>
#include <set>
#include <vector>

namespace torch_mesh {
namespace {

// One vector of a register's width, which lies anywhere.
template <size_t kBytes>
struct Words {
  using Vector [[gnu::vector_size(kBytes), gnu::aligned(8), gnu::may_alias]] = uint64_t;
};

// Where one processor reads from several places at once its memory keeps more requests under way:
// the best read that there is, and so the limit of everything that reads.
constexpr int kStreams = 4;

// Inlined into functions for each width, since a function may use only the registers it names.
template <typename Vector>
[[gnu::always_inline]] inline uint64_t sum_streams(const uint64_t* words, int64_t count) {
  constexpr int64_t kWords = sizeof(Vector) / sizeof(uint64_t);
  constexpr int64_t kStep = 2 * kWords;  // a sum of its own for each, or they wait for one another
  Vector sums[kStreams][2] = {};
  const int64_t length = count / kStreams / kStep * kStep;
  for (int64_t at = 0; at < length; at += kStep) {
    for (int stream = 0; stream < kStreams; ++stream) {
      const uint64_t* place = words + stream * length + at;
      sums[stream][0] += *reinterpret_cast<const Vector*>(place);
      sums[stream][1] += *reinterpret_cast<const Vector*>(place + kWords);
    }
  }
  Vector all = {};
  for (const auto& pair : sums) all += pair[0] + pair[1];
  uint64_t sum = 0;
  for (int64_t word = 0; word < kWords; ++word) sum += all[word];
  for (int64_t at = kStreams * length; at < count; ++at) sum += words[at];
  return sum;
}

uint64_t sum_16(const uint64_t* words, int64_t count) {
  return sum_streams<Words<16>::Vector>(words, count);
}

#if defined(__x86_64__)
[[gnu::target("avx2")]] uint64_t sum_32(const uint64_t* words, int64_t count) {
  return sum_streams<Words<32>::Vector>(words, count);
}

[[gnu::target("avx512f")]] uint64_t sum_64(const uint64_t* words, int64_t count) {
  return sum_streams<Words<64>::Vector>(words, count);
}
#endif

auto* best_sum() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return sum_64;
  if (__builtin_cpu_supports("avx2")) return sum_32;
#endif
  return sum_16;
}

}  // namespace

uint64_t record_sum(Engine& engine, int32_t layer, std::span<const int32_t> experts) {
  if (std::set<int32_t>(experts.begin(), experts.end()).size() != experts.size()) {
    throw Error(ErrorKind::kInvalid, "experts has an expert twice; they must be distinct");
  }
  std::vector<Claim::Entry> entries(experts.size());
  Claim claim(engine.pool(), layer, experts, entries, {.kind = ClaimKind::kVisit});
  std::vector<const uint64_t*> records;
  for (ReadyExpert ready; claim.next({&ready, 1}) > 0;) {
    records.push_back(reinterpret_cast<const uint64_t*>(ready.record));
  }
  // Each thread reads one stretch of the records from end to end.
  const int64_t words = engine.layout().bytes / static_cast<int64_t>(sizeof(uint64_t));
  std::atomic<uint64_t> sum{0};
  const auto read = [&, sum_words = best_sum()](int64_t begin, int64_t end) {
    uint64_t part = 0;
    for (int64_t at = begin; at < end;) {
      const int64_t within = at % words;
      const int64_t count = std::min(words - within, end - at);
      part += sum_words(records[at / words] + within, count);
      at += count;
    }
    sum += part;
  };
  const auto count = static_cast<int64_t>(records.size()) * words;
  parallel_for(engine.runtime(), count, engine.options().threads, read);
  claim.check_read();
  return sum;
}

}  // namespace torch_mesh
