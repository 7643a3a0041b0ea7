// One model's records on disk and in memory, with engines over them and forwards. Needs no torch.
#pragma once

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/team.h"
#include "engine/engine.h"
#include "error_of.h"
#include "kernels_fixture.h"
#include "store_fixture.h"

namespace torch_mesh::testing {

inline constexpr int32_t kLayers = 2;
inline constexpr int32_t kExperts = 12;

inline void parallel_for_team(int64_t count, int32_t threads, ParallelBody body, void* context) {
  static Team team;
  team.parallel_for(count, threads, body, context);
}

inline Runtime thread_runtime() {
  Runtime runtime;
  runtime.parallel_for = parallel_for_team;
  return runtime;
}

// The records of one model, on disk and in memory.
class Model {
 public:
  explicit Model(const Shape& shape)
      : shape_(shape), file_(kLayers, kExperts, [this](int32_t, int32_t) {
          records_.push_back(Weights(shape_.layout(), random_).pack(kernel_table()));
          const Bytes& record = records_.back();
          return std::vector<std::byte>(record.data(), record.data() + record.size());
        }) {}

  const Shape& shape() const { return shape_; }
  const Bytes& record(int32_t layer, int32_t expert) const {
    return records_[layer * kExperts + expert];
  }

  struct Options {
    int32_t slots = kLayers * kExperts;
    std::string policy = "lru";
    std::string reader = "threads";
    int32_t threads = 1;
    int64_t workspace = int64_t{64} << 20;
    Faults faults = {};
    Topology topology = {};
    PrefillWindow prefill = PrefillWindow::kAuto;
  };

  std::unique_ptr<Engine> open(const Options& options,
                               const Runtime& runtime = thread_runtime()) const {
    PoolOptions pool = pool_options(options);
    return std::make_unique<Engine>(engine_options(options), runtime,
                                    make_owned<Pool>(pool, runtime, file_.source(), nullptr));
  }

  // An engine with every expert in memory and no reader.
  std::unique_ptr<Engine> open_resident(const Options& options,
                                        const Runtime& runtime = thread_runtime()) const {
    PoolOptions pool_of_all = pool_options(options);
    pool_of_all.slots = kLayers * kExperts;
    auto pool = make_owned<Pool>(pool_of_all, runtime, kLayers, kExperts);
    for (int32_t id = 0; id < kLayers * kExperts; ++id) {
      const Bytes& bytes = records_[id];
      pool->fill(id / kExperts, id % kExperts, {bytes.data(), static_cast<size_t>(bytes.size())});
    }
    return std::make_unique<Engine>(engine_options(options), runtime, std::move(pool));
  }

  // For a process that exits without destructors. Engines that are open can still read.
  void remove_file() const { std::filesystem::remove(file_.path()); }

 private:
  EngineOptions engine_options(const Options& options) const {
    return {.layout = shape_.layout(),
            .activations = {shape_.activation},
            .threads = options.threads,
            .workspace = options.workspace};
  }
  PoolOptions pool_options(const Options& options) const {
    PoolOptions pool;
    pool.slots = options.slots;
    pool.prefill = options.prefill;
    pool.record_bytes = shape_.layout().bytes;
    pool.policy = options.policy;
    pool.verify = Verify::kAlways;
    pool.reader.backend = options.reader;
    pool.reader.chunk_bytes = 8192;
    pool.reader.interpose = with_faults(options.faults);
    pool.topology = options.topology;
    return pool;
  }

  Shape shape_;
  Random random_;
  std::vector<Bytes> records_;
  RecordFile file_;
};

inline Shape small_shape(Format format) {
  return {.format = format, .group = 32, .hidden = 96, .intermediate = 80};
}

// The tokens of one forward and what their router chose.
struct Batch {
  Batch(int32_t tokens, int32_t top_k, int32_t hidden, uint64_t seed)
      : tokens(tokens), top_k(top_k), stride(hidden + 5), hidden(hidden) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    x.assign(static_cast<size_t>(tokens * stride), std::numeric_limits<float>::quiet_NaN());
    for (int32_t token = 0; token < tokens; ++token) {
      for (int32_t i = 0; i < hidden; ++i) x[token * stride + i] = normal(random);
    }
    std::vector<int64_t> all(kExperts);
    std::iota(all.begin(), all.end(), 0);
    for (int32_t token = 0; token < tokens; ++token) {
      std::shuffle(all.begin(), all.end(), random);
      ids.insert(ids.end(), all.begin(), all.begin() + top_k);
    }
    for (size_t i = 0; i < ids.size(); ++i) weights.push_back(0.1f + std::abs(normal(random)));
  }

  std::vector<float> run(Engine& engine, int32_t layer, bool sentinels = false) const {
    return run(engine, layer, 0, tokens, sentinels);
  }
  std::vector<float> run(Engine& engine, int32_t layer, int32_t first, int32_t count,
                         bool sentinels = false) const {
    std::vector<float> out(static_cast<size_t>(count) * hidden,
                           std::numeric_limits<float>::quiet_NaN());
    run_into(engine, layer, out, first, count, sentinels);
    return out;
  }
  void run_into(Engine& engine, int32_t layer, std::vector<float>& out) const {
    run_into(engine, layer, out, 0, tokens, false);
  }
  void run_into(Engine& engine, int32_t layer, std::vector<float>& out, int32_t first,
                int32_t count, bool sentinels) const {
    engine.experts(call(layer, out, first, count, sentinels));
  }
  ExpertsCall call(int32_t layer, std::vector<float>& out) const {
    return call(layer, out, 0, tokens, false);
  }
  ExpertsCall call(int32_t layer, std::vector<float>& out, int32_t first, int32_t count,
                   bool sentinels) const {
    return {.layer = layer,
            .tokens = count,
            .top_k = top_k,
            .x = {x.data() + first * stride, ScalarType::kFloat32, stride},
            .ids = ids.data() + first * top_k,
            .weights = weights.data() + first * top_k,
            .sentinels = sentinels,
            .out = {out.data(), ScalarType::kFloat32, hidden}};
  }

  int32_t tokens, top_k, stride, hidden;
  std::vector<float> x, weights;
  std::vector<int64_t> ids;
};

}  // namespace torch_mesh::testing
