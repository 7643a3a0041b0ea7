// Visits of a layer's records in a fixed order, while others are read ahead, for backward passes.
#include <algorithm>
#include <vector>

#include "base/error.h"
#include "engine/engine.h"

namespace torch_mesh {

// Pins a window of the experts while its runs are visited: half of the pool, or one run if that is
// more. The rest of the pool is for reads ahead.
void Engine::visit_in_order(int32_t layer, std::span<const int32_t> experts, int32_t at_once,
                            const VisitRun& visit) {
  const auto count = static_cast<int32_t>(experts.size());
  const int32_t window = std::max(pool_->slots() / 2 / at_once, 1) * at_once;
  for (int32_t begin = 0; begin < count; begin += window) {
    const int32_t end = std::min(begin + window, count);
    const std::span<const int32_t> own = experts.subspan(begin, end - begin);
    std::vector<Claim::Entry> entries(own.size());
    {
      Claim claim(*pool_, layer, own, entries, {.kind = ClaimKind::kVisit});
      if (claim.has_all_slots()) {
        visit_pinned(claim, layer, experts, begin, end, at_once, visit);
        continue;
      }
    }
    // Forwards of other threads hold the slots: copy each record and release it at once.
    visit_copies(layer, experts, begin, end, at_once, visit);
  }
}

void Engine::visit_pinned(Claim& claim, int32_t layer, std::span<const int32_t> experts,
                          int32_t begin, int32_t end, int32_t at_once, const VisitRun& visit) {
  std::vector<ReadyExpert> ready(static_cast<size_t>(end - begin));
  std::vector<const std::byte*> records(ready.size());
  for (int32_t first = begin; first < end; first += at_once) {
    const int32_t run = std::min(at_once, end - first);
    // Before each run: the slots that earlier runs released have room for more reads.
    read_ahead(layer, experts.subspan(end));
    const auto own = std::span(records).subspan(first - begin, run);
    while (std::ranges::find(own, nullptr) != own.end()) {
      ReadyExpert next;
      if (claim.next({&next, 1}, options_.threads) == 0) break;
      ready[next.index] = next;
      records[next.index] = next.record;
    }
    visit(first, own);
    claim.release(std::span(ready).subspan(first - begin, run));
  }
}

void Engine::visit_copies(int32_t layer, std::span<const int32_t> experts, int32_t begin,
                          int32_t end, int32_t at_once, const VisitRun& visit) {
  std::vector<std::vector<std::byte>> copies(static_cast<size_t>(at_once));
  for (int32_t first = begin; first < end; first += at_once) {
    const auto run = experts.subspan(first, std::min(at_once, end - first));
    read_ahead(layer, experts.subspan(first + run.size()));
    std::vector<Claim::Entry> entries(run.size());
    Claim claim(*pool_, layer, run, entries, {.kind = ClaimKind::kVisit});
    ReadyExpert ready;
    while (claim.next({&ready, 1}, options_.threads) > 0) {
      copies[ready.index].assign(ready.record, ready.record + layout().bytes);
      claim.release({&ready, 1});
    }
    std::vector<const std::byte*> records;
    for (size_t i = 0; i < run.size(); ++i) records.push_back(copies[i].data());
    visit(first, records);
  }
}

void Engine::read_ahead(int32_t layer, std::span<const int32_t> rest) {
  try {
    if (!rest.empty()) {
      pool_->prefetch(layer, rest);
    } else if (layer > 0) {
      pool_->prefetch(layer - 1, last_used_.of(layer - 1));
    }
  } catch (const Error& error) {  // close() lets the visit end
    if (error.kind() != ErrorKind::kClosed) throw;
  }
}

}  // namespace torch_mesh
