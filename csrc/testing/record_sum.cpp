#include "testing/record_sum.h"

#include <algorithm>
#include <atomic>
#include <set>
#include <vector>

namespace torch_mesh {
namespace {

using Vector [[gnu::vector_size(16), gnu::aligned(8), gnu::may_alias]] = uint64_t;

// A processor that reads from several places at once has more memory requests in flight. This is
// the fastest read, and so the limit of all kernels. It takes 16 bytes at a time, as every x86-64
// processor can: the loop is bound by memory.
constexpr int kStreams = 4;

uint64_t sum_words(const uint64_t* words, int64_t count) {
  constexpr int64_t kWords = sizeof(Vector) / sizeof(uint64_t);
  constexpr int64_t kStep = 4 * kWords;  // four sums, which do not wait for each other
  Vector sums[kStreams][4] = {};
  const int64_t length = count / kStreams / kStep * kStep;
  for (int64_t at = 0; at < length; at += kStep) {
    for (int stream = 0; stream < kStreams; ++stream) {
      const uint64_t* place = words + stream * length + at;
      for (int i = 0; i < 4; ++i) {
        sums[stream][i] += *reinterpret_cast<const Vector*>(place + i * kWords);
      }
    }
  }
  Vector all = {};
  for (const auto& of_stream : sums) {
    for (const Vector& sum : of_stream) all += sum;
  }
  uint64_t sum = all[0] + all[1];
  for (int64_t at = kStreams * length; at < count; ++at) sum += words[at];
  return sum;
}

}  // namespace

uint64_t record_sum(Engine& engine, int32_t layer, std::span<const int32_t> experts) {
  if (std::set<int32_t>(experts.begin(), experts.end()).size() != experts.size()) {
    throw_invalid("experts has an expert twice; they must be distinct");
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
  const auto read = [&](int64_t begin, int64_t end) {
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
  return sum;
}

}  // namespace torch_mesh
