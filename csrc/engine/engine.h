// One forward of a layer: group by expert, claim, compute each expert as it becomes ready, reduce.
// Uses the pool and the kernels, and is independent of torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/runtime.h"
#include "engine/last_used.h"
#include "engine/workspace.h"
#include "kernels/expert_ffn.h"
#include "kernels/low_rank.h"
#include "kernels/matrix_view.h"
#include "residency/core/forward.h"
#include "residency/pool.h"
#include "store/record.h"

namespace torch_mesh {

// Low-rank adapters of a layer's experts, one stack for each projection.
struct AdapterStack {
  LowRank first;                       // the first expert's
  int64_t a_expert = 0, b_expert = 0;  // floats from one expert to the next
  const int32_t* positions = nullptr;  // [experts]: position in the stack; nullptr: the identity

  int32_t rank() const { return first.rank; }
  LowRank of(int32_t expert) const;
};

struct Adapters {
  AdapterStack gate_up, down;
};

// Returns how many tokens a forward computes at a time, at least one. Their operands, products and
// adapter intermediates fit into `workspace` bytes.
int32_t tokens_per_chunk(const ExpertFfn& ffn, const RecordLayout& layout, int32_t top_k,
                         int64_t workspace, const Adapters& adapters = {});

struct EngineOptions {
  RecordLayout layout;
  // One for each layer, or one for all. Empty: grouped_linear is the only path.
  std::vector<Activation> activations = {};
  int32_t threads = 1;  // the most that compute
  int64_t workspace = int64_t{256} << 20;
  // One for each layer where formats differ; `layout` is then the largest. Empty: all have
  // `layout`.
  std::vector<RecordLayout> layouts = {};

  const RecordLayout& layout_of(int32_t layer) const {
    return layouts.empty() ? layout : layouts[static_cast<size_t>(layer)];
  }
};

// Throws Error(kInvalid) for options that no engine can have. Call it before opening the pool,
// which may begin to read at once.
void check(const EngineOptions& options, const Runtime& runtime, int32_t layers);

struct ExpertsCall {
  int32_t layer;
  int32_t tokens;
  int32_t top_k;
  ConstRows x;           // [tokens][hidden]
  const int64_t* ids;    // [tokens][top_k]
  const float* weights;  // [tokens][top_k]
  bool sentinels;        // ids >= experts are skipped; else they are an error
  MutableRows out;       // [tokens][hidden]
  Adapters adapters = {};
  // The call is part of a backward pass, from the last layer to the first. The layer's experts stay
  // for its own backward, and the next layer's are not read ahead.
  bool backwards = false;
  // For decode steps: distinct experts that this call leaves out of `ids`.
  Deferral deferral = {};
  bool deferred = false;  // `ids` are what an earlier call of the forward left out
  // Called once, when all of the call's own reads are queued, so that prefetches may follow. That
  // is before it computes or, if reads wait for slots, when the last of them has one. nullptr: not
  // called.
  void (*reads_queued)(void* context) = nullptr;
  void* context = nullptr;
};

struct LinearCall {
  int32_t layer;
  int32_t projection;      // 0: gate_up, 1: down
  ConstRows x;             // [rows][in], grouped by expert
  const int64_t* offsets;  // [experts + 1]
  int32_t top_k = 1;       // rows per token, to tell a decode step from a prompt
  MutableRows out;         // [rows][out]
};

class Engine {
 public:
  Engine(const EngineOptions& options, const Runtime& runtime, Owned<Pool> pool);

  // The layout that records of all layers share, with the bytes of a slot.
  const RecordLayout& layout() const { return options_.layout; }
  const RecordLayout& layout(int32_t layer) const { return options_.layout_of(layer); }
  const EngineOptions& options() const { return options_; }
  // Throws Error(kInvalid) where grouped_linear is the only path.
  const Activation& activation(int32_t layer) const;
  const Runtime& runtime() const { return runtime_; }
  Pool& pool() { return *pool_; }
  int64_t workspace_bytes() const;  // held now, over all concurrent forwards

  // Input and output features of a projection, without padding.
  int32_t in_features(int32_t projection) const;
  int32_t out_features(int32_t projection) const;

  // Throw Error: kInvalid for ids or offsets that do not fit, else what the pool throws. Nothing is
  // pinned afterwards either way. Safe from several threads at once.
  void experts(const ExpertsCall& call);
  void grouped_linear(const LinearCall& call);

  // Calls visit(expert, record) for each of the distinct `experts`, one at a time, in the order in
  // which they become ready. This is not a forward: see ClaimKind::kVisit.
  template <typename Visit>
  void visit(int32_t layer, std::span<const int32_t> experts, const Visit& visit) {
    std::vector<Claim::Entry> entries(experts.size());
    Claim claim(*pool_, layer, experts, entries, {.kind = ClaimKind::kVisit});
    ReadyExpert ready;
    while (claim.next({&ready, 1}) > 0) {
      visit(experts[ready.index], ready.record);
      claim.release({&ready, 1});
    }
  }

  // Calls visit(first, records) for runs of `at_once` of the distinct `experts` (the last may be
  // shorter), in their order whatever is resident. Reads ahead the rest of `experts`, then those
  // that the layer below used in its last forward of many rows: a backward pass goes there next.
  // Not a forward either.
  using VisitRun = std::function<void(int32_t first, std::span<const std::byte* const> records)>;
  void visit_in_order(int32_t layer, std::span<const int32_t> experts, int32_t at_once,
                      const VisitRun& visit);

 private:
  // The kernels for a forward of that phase, the same for all of its chunks.
  const ExpertFfn& ffn(int32_t layer, Phase phase) const {
    const auto& ffns = phase == Phase::kDecode ? few_rows_ffns_ : ffns_;
    return ffns[layer_index(layer, ffns.size())];
  }
  // The index of a layer in a list with one entry for each layer, or one for all.
  static size_t layer_index(int32_t layer, size_t count) {
    return std::min(static_cast<size_t>(layer), count - 1);
  }
  int32_t rows_per_chunk(const LinearCall& call) const;
  void experts_chunk(const ExpertsCall& call, ForwardPart forward, Workspace& workspace);
  // Whether a batch of experts is the first or the last of its chunk.
  struct Part {
    bool first, last;
  };
  // Calls body(ready, part) for batches of the claim's `count` experts as they become ready, once
  // if there are none. It computes and releases them.
  template <typename Body>
  void for_each_batch(Claim& claim, int32_t count, const Body& body) const;
  void compute(const ExpertsCall& call, Phase phase, std::span<const ReadyExpert> ready, Part part,
               Workspace& workspace) const;
  ExpertRows rows_of(const ReadyExpert& ready, const Adapters& adapters,
                     Workspace& workspace) const;
  void reduce(const ExpertsCall& call, int64_t token, int64_t begin, int64_t end,
              Workspace& workspace) const;
  void linear_chunk(const LinearCall& call, int64_t begin, int64_t end, ForwardPart forward,
                    Workspace& workspace);
  void visit_pinned(Claim& claim, int32_t layer, std::span<const int32_t> experts, int32_t begin,
                    int32_t end, int32_t at_once, const VisitRun& visit);
  void visit_copies(int32_t layer, std::span<const int32_t> experts, int32_t begin, int32_t end,
                    int32_t at_once, const VisitRun& visit);
  void read_ahead(int32_t layer, std::span<const int32_t> rest);
  void compute_linear(const LinearCall& call, Phase phase, int32_t rows,
                      std::span<const ReadyExpert> ready, Part part, Workspace& workspace) const;

  EngineOptions options_;
  Runtime runtime_;
  Owned<Pool> pool_;
  std::vector<ExpertFfn> ffns_;           // by layer, or one for all
  std::vector<ExpertFfn> few_rows_ffns_;  // for decode steps: a row has the bits it has alone
  WorkspacePool workspaces_;
  LastUsed last_used_;
};

}  // namespace torch_mesh
