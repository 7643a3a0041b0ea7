// Least frequently used with decay: the heat of an expert is the sum of kDecay^(ticks since) over
// its uses, where a tick is one forward of its layer. Heat outlives eviction, so that an expert
// that comes back keeps its past.
//
// Nothing is ever decayed. Instead one use weighs 1/kDecay more with every tick of its layer, and
// heat is read relative to the present weight of the layer. Within a layer the order of experts
// then changes only when one of them is used, so each layer keeps a heap, and a victim is the least
// of the layers' heads.
#include "residency/policies/policy.h"

namespace torch_mesh {
namespace {

constexpr double kDecay = 0.97;
// What a router probability of 1 adds, in uses.
constexpr double kScoreHeat = 1.0;
constexpr double kMaxWeight = 0x1p400;

class Lfu final : public Policy {
 public:
  explicit Lfu(const PolicyOptions& options)
      : Policy(options.all()),
        experts_(options.experts),
        weight_(static_cast<size_t>(options.layers), 1.0),
        heap_size_(static_cast<size_t>(options.layers), 0),
        heat_(static_cast<size_t>(options.layers) * options.experts, 0.0),
        last_use_(heat_.size(), 0),
        position_(heat_.size(), 0),
        heap_(heat_.size(), kNoExpert) {}

  void admitted(ExpertId id) override { last_use_[id] = ++clock_; }
  void gained(ExpertId id) override { push(id); }
  void lost(ExpertId id) override { erase(id); }

  void touch(ExpertId id) override {
    heat_[id] += weight_[id / experts_];
    last_use_[id] = ++clock_;
    if (evictable(id)) sink(id / experts_, position_[id]);
  }

  ExpertId victim() override {
    ExpertId coldest = kNoExpert;
    for (size_t layer = 0; layer < weight_.size(); ++layer) {
      if (heap_size_[layer] == 0) continue;
      const ExpertId id = head(static_cast<int32_t>(layer))[0];
      if (coldest == kNoExpert || colder(id, coldest)) coldest = id;
    }
    return coldest;
  }

  void observe(int32_t layer, std::span<const float> scores) override {
    const ExpertId first = layer * experts_;
    for (int32_t expert = 0; expert < experts_; ++expert) {
      heat_[first + expert] += weight_[layer] * kScoreHeat * static_cast<double>(scores[expert]);
    }
    restore_order(layer);
  }

  void tick(int32_t layer, std::span<const int32_t>) override {
    weight_[layer] /= kDecay;
    if (weight_[layer] < kMaxWeight) return;
    // A power of two: relative heat stays as it was, until it is too small for a number and ties go
    // by last use.
    weight_[layer] /= kMaxWeight;
    for (int32_t expert = 0; expert < experts_; ++expert) {
      heat_[layer * experts_ + expert] /= kMaxWeight;
    }
    restore_order(layer);
  }

  // What uses at these rates would have come to.
  void start_from(const ModelUse& use) override {
    for (size_t id = 0; id < heat_.size(); ++id) {
      heat_[id] = static_cast<double>(use.rate(static_cast<int64_t>(id))) / (1 - kDecay);
    }
  }

 private:
  // Equally cold: the one that was used longer ago. Within a layer heat is compared as it is
  // stored, so that rounding cannot make the order of a heap depend on the weight of the moment.
  bool colder(ExpertId a, ExpertId b) const {
    const int32_t layer_a = a / experts_, layer_b = b / experts_;
    const bool same = layer_a == layer_b;
    const double heat_a = same ? heat_[a] : heat_[a] / weight_[layer_a];
    const double heat_b = same ? heat_[b] : heat_[b] / weight_[layer_b];
    return heat_a != heat_b ? heat_a < heat_b : last_use_[a] < last_use_[b];
  }

  ExpertId* head(int32_t layer) { return &heap_[static_cast<size_t>(layer) * experts_]; }

  void put(ExpertId* heap, int32_t at, ExpertId id) {
    heap[at] = id;
    position_[id] = at;
  }

  void rise(int32_t layer, int32_t at) {
    ExpertId* heap = head(layer);
    const ExpertId id = heap[at];
    for (; at > 0 && colder(id, heap[(at - 1) / 2]); at = (at - 1) / 2) {
      put(heap, at, heap[(at - 1) / 2]);
    }
    put(heap, at, id);
  }

  void restore_order(int32_t layer) {
    for (int32_t at = heap_size_[layer] / 2; at-- > 0;) sink(layer, at);
  }

  void sink(int32_t layer, int32_t at) {
    ExpertId* heap = head(layer);
    const int32_t size = heap_size_[layer];
    const ExpertId id = heap[at];
    for (int32_t child = 2 * at + 1; child < size; child = 2 * at + 1) {
      if (child + 1 < size && colder(heap[child + 1], heap[child])) ++child;
      if (!colder(heap[child], id)) break;
      put(heap, at, heap[child]);
      at = child;
    }
    put(heap, at, id);
  }

  void push(ExpertId id) {
    const int32_t layer = id / experts_;
    put(head(layer), heap_size_[layer], id);
    rise(layer, heap_size_[layer]++);
  }

  void erase(ExpertId id) {
    const int32_t layer = id / experts_, at = position_[id];
    const ExpertId moved = head(layer)[--heap_size_[layer]];
    if (moved == id) return;
    put(head(layer), at, moved);
    rise(layer, at);
    sink(layer, position_[moved]);
  }

  int32_t experts_;
  uint64_t clock_ = 0;
  std::vector<double> weight_;      // [layers] of one use, now
  std::vector<int32_t> heap_size_;  // [layers]
  // By expert id.
  std::vector<double> heat_;
  std::vector<uint64_t> last_use_;
  std::vector<int32_t> position_;  // in its layer's heap
  std::vector<ExpertId> heap_;     // [layers][experts]: evictable ids, the coldest first
};

}  // namespace

std::unique_ptr<Policy> make_lfu(const PolicyOptions& options) {
  return std::make_unique<Lfu>(options);
}

}  // namespace torch_mesh
