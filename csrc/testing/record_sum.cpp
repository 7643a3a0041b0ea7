#include "testing/record_sum.h"

#include <algorithm>
#include <atomic>
#include <set>
#include <vector>

namespace torch_mesh {
namespace {

// Sixteen bytes at a time, as every x86-64 processor can: the loop is bound by memory.
uint64_t sum_words(const uint64_t* words, int64_t count) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += words[i];
  return sum;
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
  claim.check_read();
  return sum;
}

}  // namespace torch_mesh
