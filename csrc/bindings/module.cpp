// The control plane, torch_mesh._C; torch_mesh/_C.pyi is its reference.
#include <ATen/Parallel.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/version.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

#include "bindings/device.h"
#include "bindings/errors.h"
#include "bindings/product_time.h"
#include "bindings/profile.h"
#include "bindings/record_sum.h"
#include "bindings/registry.h"
#include "bindings/replay.h"
#include "bindings/runtime.h"
#include "io/mapped_files.h"
#include "io/reader.h"
#include "kernels/kernel_table.h"
#include "kernels/pack.h"
#include "residency/memory/topology.h"
#include "store/source.h"

namespace torch_mesh {
namespace {

namespace py = pybind11;
using Int64Array = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;
using UInt64Array = py::array_t<uint64_t, py::array::c_style>;
using ByteArray = py::array_t<uint8_t, py::array::c_style>;

[[noreturn]] void invalid(const std::string& message) { throw Error(ErrorKind::kInvalid, message); }

// -- sources
// ----------------------------------------------------------------------------------------

// One matrix inside the pieces of a raw expert.
struct RawView {
  int32_t piece = -1;
  int64_t offset = 0;
  int64_t row_stride = 0;
  int64_t column_stride = 0;
};

struct RawViews {
  ScalarType type = ScalarType::kBf16;
  RawView gate, up, down, gate_bias, up_bias, down_bias;
};

struct PySource {
  Source source;
  RawViews views;
};

std::array<uint8_t, 16> store_id_from(const py::bytes& bytes) {
  const std::string_view view = bytes;
  std::array<uint8_t, 16> id{};
  if (view.size() != id.size()) {
    invalid("store_id has " + std::to_string(view.size()) + " bytes; allowed: 16");
  }
  std::memcpy(id.data(), view.data(), id.size());
  return id;
}

ScalarType raw_type(const std::string& name) {
  if (name == "bf16") return ScalarType::kBf16;
  if (name == "fp16") return ScalarType::kFloat16;
  if (name == "fp32") return ScalarType::kFloat32;
  invalid("raw_dtype is '" + name + "'; allowed: 'bf16', 'fp16', 'fp32'");
}

RawViews raw_views_from(const std::string& dtype, const py::dict& views, int32_t pieces) {
  RawViews result;
  result.type = raw_type(dtype);
  const std::map<std::string, RawView*> known = {
      {"gate", &result.gate},       {"up", &result.up},
      {"down", &result.down},       {"gate_bias", &result.gate_bias},
      {"up_bias", &result.up_bias}, {"down_bias", &result.down_bias}};
  for (const auto& [key, value] : views) {
    const auto name = key.cast<std::string>();
    const auto found = known.find(name);
    if (found == known.end()) invalid("raw_views has no matrix named '" + name + "'");
    const auto view = value.cast<py::dict>();
    *found->second = RawView{.piece = view["piece"].cast<int32_t>(),
                             .offset = view["offset"].cast<int64_t>(),
                             .row_stride = view["row_stride"].cast<int64_t>(),
                             .column_stride = view["column_stride"].cast<int64_t>()};
    if (found->second->piece < 0 || found->second->piece >= pieces) {
      invalid("raw_views['" + name + "'] names piece " + std::to_string(found->second->piece) +
              "; there are " + std::to_string(pieces));
    }
  }
  return result;
}

PySource make_source(const std::vector<std::pair<std::string, int64_t>>& files,
                     const Int64Array& extents, const std::optional<UInt64Array>& checksums,
                     const py::bytes& store_id, const std::optional<std::string>& raw_dtype,
                     const std::optional<py::dict>& raw_views) {
  if (extents.ndim() != 4 || extents.shape(3) != 3 || extents.shape(2) < 1 ||
      extents.shape(2) > kMaxPieces) {
    invalid("extents must be int64 [layers, experts, pieces (1 to " + std::to_string(kMaxPieces) +
            "), 3]");
  }
  PySource result;
  Source& source = result.source;
  for (const auto& [path, bytes] : files) source.files.push_back(File{path, bytes});
  source.layers = static_cast<int32_t>(extents.shape(0));
  source.experts = static_cast<int32_t>(extents.shape(1));
  source.pieces = static_cast<int32_t>(extents.shape(2));
  source.store_id = store_id_from(store_id);
  source.raw = raw_dtype.has_value();
  const int64_t* at = extents.data();
  source.extents.reserve(extents.size() / 3);
  for (py::ssize_t i = 0; i < extents.size() / 3; ++i, at += 3) {
    // A number beyond int32 must not wrap into a valid index.
    if (at[0] < 0 || at[0] >= static_cast<int64_t>(files.size())) {
      invalid("an extent names file " + std::to_string(at[0]) + " of " +
              std::to_string(files.size()));
    }
    source.extents.push_back(Extent{static_cast<int32_t>(at[0]), at[1], at[2]});
  }
  if (checksums) source.checksums.assign(checksums->data(), checksums->data() + checksums->size());
  if (raw_dtype) {
    if (!raw_views) invalid("a raw source needs raw_views");
    result.views = raw_views_from(*raw_dtype, *raw_views, source.pieces);
  }
  validate(source);
  return result;
}

// The last element that a view touches must lie within its piece, for every expert.
void check_view(const Source& source, const RawView& view, ScalarType type, int64_t rows,
                int64_t columns, const char* name) {
  if (view.piece < 0) invalid(std::string("raw_views lacks '") + name + "'");
  if (view.offset < 0 || view.row_stride < 0 || view.column_stride < 0) {
    invalid(std::string("raw_views['") + name + "'] has a negative offset or stride");
  }
  const __int128 last = static_cast<__int128>(view.offset) +
                        static_cast<__int128>(rows - 1) * view.row_stride +
                        static_cast<__int128>(columns - 1) * view.column_stride;
  const __int128 bytes = (last + 1) * scalar_bytes(type);
  for (int32_t layer = 0; layer < source.layers; ++layer) {
    for (int32_t expert = 0; expert < source.experts; ++expert) {
      const int64_t have = source.expert(layer, expert)[view.piece].bytes;
      if (bytes > have) {
        invalid(std::string("'") + name + "' of layer " + std::to_string(layer) + ", expert " +
                std::to_string(expert) + " has " + std::to_string(have) +
                " bytes on disk; its shape needs " + std::to_string(static_cast<int64_t>(bytes)));
      }
    }
  }
}

void check_views(const PySource& source, const RecordLayout& layout) {
  const auto check = [&](const RawView& view, int64_t rows, int64_t columns, const char* name) {
    check_view(source.source, view, source.views.type, rows, columns, name);
  };
  const RawViews& views = source.views;
  if (layout.gated) check(views.gate, layout.intermediate, layout.hidden, "gate");
  check(views.up, layout.intermediate, layout.hidden, "up");
  check(views.down, layout.hidden, layout.intermediate, "down");
  if (!layout.bias) return;
  if (layout.gated) check(views.gate_bias, layout.intermediate, 1, "gate_bias");
  check(views.up_bias, layout.intermediate, 1, "up_bias");
  check(views.down_bias, layout.hidden, 1, "down_bias");
}

PackRecord pack_from(const RawViews& views, const RecordLayout& layout) {
  return [views, layout](int32_t, std::span<const std::byte* const> pieces, std::byte* record) {
    const auto view = [&](const RawView& raw) -> MatrixView {
      if (raw.piece < 0) return {};
      return {pieces[raw.piece] + raw.offset * scalar_bytes(views.type), views.type, raw.row_stride,
              raw.column_stride};
    };
    pack_record(layout,
                ExpertViews{.gate = layout.gated ? view(views.gate) : MatrixView{},
                            .up = view(views.up),
                            .down = view(views.down),
                            .gate_bias = view(views.gate_bias),
                            .up_bias = view(views.up_bias),
                            .down_bias = view(views.down_bias)},
                record);
  };
}

// -- the engine
// ---------------------------------------------------------------------------------------

// Of torch's, as many as an engine may have.
int32_t torch_threads() { return std::min(at::get_num_threads(), kMostThreads); }

// Within what clocks can add to the present.
double seconds_from(double seconds, const char* name, bool none_allowed) {
  if (seconds >= (none_allowed ? 0 : 1e-3) && seconds <= kLongestTimeout) return seconds;
  invalid(std::string(name) + " is " + std::to_string(seconds) +
          " seconds; allowed: " + (none_allowed ? "0" : "0.001") + " to " +
          std::to_string(static_cast<int64_t>(kLongestTimeout)));  // NaN comes here, too
}

std::chrono::milliseconds milliseconds_from(double seconds, const char* name, bool none_allowed) {
  return std::chrono::milliseconds(
      static_cast<int64_t>(seconds_from(seconds, name, none_allowed) * 1e3));
}

Faults faults_from(const std::map<std::string, double>& given) {
  Faults faults;
  const std::map<std::string, double*> probabilities = {{"short_read", &faults.short_read},
                                                        {"eintr", &faults.eintr},
                                                        {"eagain", &faults.eagain},
                                                        {"eio_once", &faults.eio_once},
                                                        {"eio_always", &faults.eio_always},
                                                        {"delay", &faults.delay},
                                                        {"reorder", &faults.reorder},
                                                        {"bit_flip", &faults.bit_flip},
                                                        {"wrong_offset", &faults.wrong_offset}};
  for (const auto& [name, value] : given) {
    if (name == "seed") {
      faults.seed = static_cast<uint64_t>(value);
    } else if (name == "max_delay") {
      const double seconds = seconds_from(value, "max_delay", /*none_allowed=*/true);
      faults.max_delay = std::chrono::microseconds(static_cast<int64_t>(seconds * 1e6));
    } else if (const auto found = probabilities.find(name); found != probabilities.end()) {
      *found->second = value;
    } else {
      invalid("no fault is named '" + name + "'");
    }
  }
  return faults;
}

PrefillWindow prefill_from(const std::string& name) {
  if (name == "auto") return PrefillWindow::kAuto;
  if (name == "window") return PrefillWindow::kAlways;
  if (name == "off") return PrefillWindow::kNever;
  invalid("prefill is '" + name + "'; allowed: 'auto', 'window', 'off'");
}

Verify verify_from(const std::string& name) {
  if (name == "first") return Verify::kFirst;
  if (name == "always") return Verify::kAlways;
  if (name == "never") return Verify::kNever;
  invalid("verify is '" + name + "'; allowed: 'first', 'always', 'never'");
}

py::dict dict_of_layers(const std::vector<LayerStats>& layers) {
  py::dict result;
  const std::pair<const char*, int64_t LayerStats::*> fields[] = {
      {"forwards", &LayerStats::forwards},
      {"accesses", &LayerStats::accesses},
      {"hits", &LayerStats::hits},
      {"cold_misses", &LayerStats::cold_misses},
      {"inflight_misses", &LayerStats::inflight_misses},
      {"kept_accesses", &LayerStats::kept_accesses},
      {"kept_hits", &LayerStats::kept_hits},
      {"deferred", &LayerStats::deferred},
      {"rerouted", &LayerStats::rerouted},
      {"promoted", &LayerStats::promoted},
      {"evicted", &LayerStats::evicted},
      {"bytes_read", &LayerStats::bytes_read},
      {"prefetches", &LayerStats::prefetches},
      {"prefetches_used", &LayerStats::prefetches_used},
      {"prefetches_wasted", &LayerStats::prefetches_wasted},
      {"wasted_bytes", &LayerStats::wasted_bytes},
      {"prefetches_failed", &LayerStats::prefetches_failed},
      {"failed", &LayerStats::failed},
      {"stall_nanoseconds", &LayerStats::stall_nanoseconds},
      {"decision_nanoseconds", &LayerStats::decision_nanoseconds}};
  for (const auto& [name, member] : fields) {
    py::array_t<int64_t> values(static_cast<py::ssize_t>(layers.size()));
    for (size_t i = 0; i < layers.size(); ++i) values.mutable_at(i) = layers[i].*member;
    result[name] = values;
  }
  return result;
}

py::dict dict_of_experts(const std::vector<ExpertStats>& experts,
                         const std::array<py::ssize_t, 2>& shape) {
  py::dict result;
  const std::pair<const char*, int64_t ExpertStats::*> fields[] = {
      {"accesses", &ExpertStats::accesses},
      {"hits", &ExpertStats::hits},
      {"cold_misses", &ExpertStats::cold_misses},
      {"inflight_misses", &ExpertStats::inflight_misses},
      {"deferred", &ExpertStats::deferred},
      {"promoted", &ExpertStats::promoted},
      {"evicted", &ExpertStats::evicted},
      {"prefetches", &ExpertStats::prefetches}};
  for (const auto& [name, member] : fields) {
    py::array_t<int64_t> values(shape);
    int64_t* to = values.mutable_data();
    for (const ExpertStats& expert : experts) *to++ = expert.*member;
    result[name] = values;
  }
  return result;
}

class PyEngine {
 public:
  PyEngine(int32_t layers, int32_t experts, const std::string& format, int32_t group_size,
           int32_t hidden, int32_t intermediate, bool gated, bool bias,
           const std::optional<std::string>& activation, int32_t slots, const std::string& policy,
           const std::string& verify, const std::string& io, int32_t threads, int64_t workspace,
           double timeout, const std::string& prefill, const PySource* source,
           const std::optional<std::map<std::string, double>>& faults, int32_t least_slots,
           const std::optional<ProfileArrays>& profile, double pins, int32_t early_layers,
           int32_t early_experts, const std::vector<bool>& elsewhere) {
    const RecordLayout layout =
        RecordLayout::make(format_from_name(format), group_size, hidden, intermediate, gated, bias);
    EngineOptions engine{.layout = layout,
                         .activation = {},
                         .threads = threads == 0 ? torch_threads() : threads,
                         .workspace = workspace,
                         .prefill = prefill_from(prefill)};
    if (activation) engine.activation = activation_from_name(*activation);
    PoolOptions pool;
    pool.slots = slots;
    pool.least_slots = least_slots;
    pool.record_bytes = layout.bytes;
    pool.policy = policy;
    pool.kept = kept_options(profile, pins, early_layers, early_experts);
    pool.kept.elsewhere = elsewhere;
    pool.verify = verify_from(verify);
    pool.timeout = milliseconds_from(timeout, "timeout", /*none_allowed=*/false);
    pool.reader.backend = io;
    if (faults) pool.reader.faults = faults_from(*faults);

    const Runtime& runtime = torch_runtime();
    py::gil_scoped_release released;
    check(engine, runtime);
    std::unique_ptr<Pool> made;
    if (source == nullptr) {
      made = std::make_unique<Pool>(pool, runtime, layers, experts);
    } else {
      if (source->source.layers != layers || source->source.experts != experts) {
        invalid("the source has " + std::to_string(source->source.layers) + " layers of " +
                std::to_string(source->source.experts) + " experts; the model " +
                std::to_string(layers) + " of " + std::to_string(experts));
      }
      if (source->source.raw) check_views(*source, layout);
      made = std::make_unique<Pool>(
          pool, runtime, source->source,
          source->source.raw ? pack_from(source->views, layout) : PackRecord());
    }
    live_ = register_engine(std::make_unique<Engine>(engine, runtime, std::move(made)));
    id_ = live_->id;
    generation_ = live_->generation;
  }

  ~PyEngine() {
    try {
      close(/*wait=*/true);
    } catch (const std::exception&) {  // which would end the process
      // A forked child can only forget its parent's engine. Who interrupts wants the wait to end.
      if (restore_interrupt()) PyErr_WriteUnraisable(nullptr);
    }
  }

  int64_t id() const { return id_; }
  int64_t generation() const { return generation_; }

  void fill(int32_t layer, int32_t expert, const ByteArray& record) {
    const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(record.data()),
                                           static_cast<size_t>(record.size()));
    const std::shared_ptr<LiveEngine> live = open();
    py::gil_scoped_release released;
    live->engine->pool().fill(layer, expert, bytes);
  }

  ByteArray read_record(int32_t layer, int32_t expert) {
    ByteArray copy(look([](Engine& engine) { return engine.layout().bytes; }));
    const std::shared_ptr<LiveEngine> live = open();
    const Pool& pool = live->engine->pool();
    if (layer < 0 || layer >= pool.layers() || expert < 0 || expert >= pool.experts()) {
      invalid("layer " + std::to_string(layer) + ", expert " + std::to_string(expert) +
              " is outside [0, " + std::to_string(pool.layers()) + ") x [0, " +
              std::to_string(pool.experts()) + ")");
    }
    const auto bytes = static_cast<size_t>(copy.size());
    auto* to = copy.mutable_data();
    py::gil_scoped_release released;
    live->engine->visit(layer, {&expert, 1},
                        [&](int32_t, const std::byte* record) { std::memcpy(to, record, bytes); });
    return copy;
  }

  uint64_t sum_records(int32_t layer, const std::vector<int32_t>& experts) {
    const std::shared_ptr<LiveEngine> live = open();
    py::gil_scoped_release released;
    return record_sum(*live->engine, layer, experts);
  }

  py::dict stats() {
    return dict_of_layers(look([](Engine& engine) { return engine.pool().stats(); }));
  }

  py::dict detailed_stats() {
    struct Seen {
      PoolStats stats;
      std::array<py::ssize_t, 2> shape;
      int32_t most_slots;
    };
    const auto [stats, shape, most_slots] = look([](Engine& engine) {
      const Pool& pool = engine.pool();
      return Seen{pool.detailed_stats(), {pool.layers(), pool.experts()}, pool.most_slots()};
    });
    py::dict result;
    for (const auto& [name, phase] : {std::pair{"none", Phase::kNone},
                                      {"prefill", Phase::kPrefill},
                                      {"decode", Phase::kDecode}}) {
      result[name] = dict_of_layers(stats.layers[static_cast<size_t>(phase)]);
    }
    result["experts"] = dict_of_experts(stats.experts, shape);
    result["prefetch_error"] = stats.prefetch_error ? exception_of(*stats.prefetch_error)
                                                    : py::reinterpret_borrow<py::object>(Py_None);
    result["slots"] = stats.slots;
    result["kept"] = stats.kept;
    result["most_slots"] = most_slots;
    result["shrinks"] = stats.shrinks;
    result["grows"] = stats.grows;
    return result;
  }

  void reset_stats() { open()->engine->pool().reset_stats(); }

  void warm_up() {
    const std::shared_ptr<LiveEngine> live = open();
    py::gil_scoped_release released;
    live->engine->pool().warm_up();
  }

  ProfileArrays model_use() {
    return profile_arrays(look([](Engine& engine) { return engine.pool().model_use(); }));
  }

  int64_t forwards(int32_t layer) { return open()->engine->pool().forwards(layer); }

  bool wait_for_forwards(int32_t layer, int64_t forwards, double patience) {
    const std::shared_ptr<LiveEngine> live = live_;
    if (live == nullptr) return false;
    const auto milliseconds = milliseconds_from(patience, "patience", /*none_allowed=*/true);
    py::gil_scoped_release released;
    return live->engine->pool().wait_for_forwards(layer, forwards, milliseconds);
  }

  py::dict describe_size() {
    using Sizes = std::array<std::pair<const char*, int64_t>, 7>;
    const Sizes sizes = look([](Engine& engine) {
      const Pool& pool = engine.pool();
      return Sizes{{{"slots", pool.slots()},
                    {"least_slots", pool.least_slots()},
                    {"most_slots", pool.most_slots()},
                    {"segment_slots", pool.segment_slots()},
                    {"record_bytes", engine.layout().bytes},
                    {"slot_bytes", pool.slot_bytes()},
                    {"mapped_bytes", pool.mapped_bytes()}}};
    });
    py::dict result;
    for (const auto& [name, size] : sizes) result[name] = size;
    return result;
  }

  int32_t resize(int32_t slots) {
    const std::shared_ptr<LiveEngine> live = open();
    py::gil_scoped_release released;
    return live->engine->pool().resize(slots);
  }

  int32_t pinned() { return open()->engine->pool().pinned(); }
  void validate() { open()->engine->pool().validate(); }

  void drain() {
    const std::shared_ptr<LiveEngine> live = open();
    py::gil_scoped_release released;
    live->engine->pool().drain();
  }

  void close(bool wait) {
    // Under the GIL, so that one of several callers gets it.
    std::shared_ptr<LiveEngine> live = std::move(live_);
    if (live == nullptr) return;
    py::gil_scoped_release released;
    unregister_engine(id_);
    live->engine->pool().close();
    const std::chrono::milliseconds timeout = live->engine->pool().timeout();
    const std::shared_ptr<Freeing> freeing = live->freeing;
    live.reset();
    // A signal handler runs inside the forward that it interrupts, which cannot end before it. And
    // a process that ends need not wait for what goes with it.
    if (!wait || in_signal_handler() || !Py_IsInitialized()) return;
    freeing->wait(timeout, torch_runtime());
  }

  py::dict describe() {
    struct Seen {
      int32_t slots, most_slots, threads;
      int64_t record_bytes, pool_bytes, mapped_bytes, workspace_bytes;
      std::string policy, io;
      std::vector<std::string> notes;
    };
    const Seen seen = look([](Engine& engine) {
      const Pool& pool = engine.pool();
      const Reader* reader = pool.reader();
      return Seen{.slots = pool.slots(),
                  .most_slots = pool.most_slots(),
                  .threads = engine.options().threads,
                  .record_bytes = engine.layout().bytes,
                  .pool_bytes = pool.memory_bytes(),
                  .mapped_bytes = pool.mapped_bytes(),
                  .workspace_bytes = engine.workspace_bytes(),
                  .policy = pool.policy(),
                  .io = reader == nullptr ? "memory" : reader->backend(),
                  .notes = reader == nullptr ? std::vector<std::string>{} : reader->notes()};
    });
    py::dict result;
    result["slots"] = seen.slots;
    result["most_slots"] = seen.most_slots;
    result["record_bytes"] = seen.record_bytes;
    result["pool_bytes"] = seen.pool_bytes;
    result["mapped_bytes"] = seen.mapped_bytes;
    result["workspace_bytes"] = seen.workspace_bytes;
    result["policy"] = seen.policy;
    result["io"] = seen.io;
    result["isa"] = kernel_table_name(kernel_table());
    result["threads"] = seen.threads;
    result["notes"] = seen.notes;
    return result;
  }

 private:
  std::shared_ptr<LiveEngine> open() const {
    if (live_ == nullptr) throw Error(ErrorKind::kClosed, "this engine is closed");
    return live_;
  }

  // What `see` says of the engine, which is let go of before anything of Python's is made of that:
  // the garbage collector may run then, find the model dead and close this engine, which waits for
  // its last user.
  template <typename See>
  std::invoke_result_t<See, Engine&> look(const See& see) const {
    const std::shared_ptr<LiveEngine> live = open();
    return see(*live->engine);
  }

  std::shared_ptr<LiveEngine> live_;
  int64_t id_ = 0;
  int64_t generation_ = 0;
};

// -- functions
// ----------------------------------------------------------------------------------------

py::dict features() {
  py::dict result;
  std::string tables;
  for (const std::string_view name : kernel_tables()) {
    tables += (tables.empty() ? "" : " ") + std::string(name);
  }
  result["isa"] = kernel_table_name(kernel_table());
  result["isas"] = tables;
  result["uring"] = uring_unavailable();
  result["populate_read"] = populate_read_works() ? "" : "this kernel is older than 5.14";
  result["brgemm_bf16"] = brgemm_bf16_unavailable();
  result["brgemm_int8"] = brgemm_int8_unavailable();
  result["numa_nodes"] = std::to_string(std::max<size_t>(memory_nodes().size(), 1));
  result["numa_compute_nodes"] = std::to_string(Topology::of_this_process().nodes());
  return result;
}

int64_t record_bytes(const std::string& format, int32_t group_size, int32_t hidden,
                     int32_t intermediate, bool gated, bool bias) {
  return RecordLayout::make(format_from_name(format), group_size, hidden, intermediate, gated, bias)
      .bytes;
}

// For the kernels of other devices, which are not C++.
std::map<std::string, int64_t> record_layout(const std::string& format, int32_t group_size,
                                             int32_t hidden, int32_t intermediate, bool gated,
                                             bool bias) {
  const RecordLayout layout =
      RecordLayout::make(format_from_name(format), group_size, hidden, intermediate, gated, bias);
  return {{"bytes", layout.bytes},
          {"group_bytes", layout.down.group_bytes},
          {"scales_bytes", layout.down.scales_bytes()},
          {"gate_up_offset", layout.gate_up_offset},
          {"gate_up_block_bytes", layout.gate_up.block_bytes},
          {"gate_up_bias_offset", layout.gate_up_bias_offset},
          {"down_offset", layout.down_offset},
          {"down_block_bytes", layout.down.block_bytes},
          {"down_bias_offset", layout.down_bias_offset}};
}

int32_t chunk_tokens(const std::string& format, int32_t group_size, int32_t hidden,
                     int32_t intermediate, bool gated, bool bias, int32_t top_k,
                     int64_t workspace) {
  const RecordLayout layout =
      RecordLayout::make(format_from_name(format), group_size, hidden, intermediate, gated, bias);
  if (top_k < 1 || workspace < 1) invalid("top_k and workspace must be 1 or more");
  const ExpertFfn ffn(layout, Activation::kSilu, torch_runtime(), kernel_table());
  return tokens_per_chunk(ffn, layout, top_k, workspace);
}

int64_t linear_bytes(const std::string& format, int32_t group_size, int32_t in_features,
                     int32_t out_features) {
  return PackedMatrix::make(format_from_name(format), group_size, out_features, in_features)
      .bytes();
}

uint64_t checksum(const py::bytes& store_id, int32_t layer, int32_t expert,
                  const py::buffer& record) {
  const std::array<uint8_t, 16> id = store_id_from(store_id);
  const py::buffer_info info = record.request();
  if (!PyBuffer_IsContiguous(info.view(), 'C')) invalid("the record must be contiguous bytes");
  py::gil_scoped_release released;
  return record_checksum(id, layer, expert, static_cast<const std::byte*>(info.ptr),
                         info.size * info.itemsize);
}

std::vector<std::string> policies() {
  const std::vector<std::string_view> names = policy_names();
  return {names.begin(), names.end()};
}

}  // namespace
}  // namespace torch_mesh

PYBIND11_MODULE(_C, m) {
  namespace py = pybind11;
  using torch_mesh::PyEngine;
  using torch_mesh::PySource;
  torch_mesh::register_error_translator();

  m.attr("torch_version") = TORCH_VERSION;
  m.def("features", torch_mesh::features);
  m.def("record_bytes", torch_mesh::record_bytes, py::arg("format"), py::arg("group_size"),
        py::arg("hidden"), py::arg("intermediate"), py::arg("gated"), py::arg("bias"));
  m.def("record_layout", torch_mesh::record_layout, py::arg("format"), py::arg("group_size"),
        py::arg("hidden"), py::arg("intermediate"), py::arg("gated"), py::arg("bias"));
  m.def("tokens_per_chunk", torch_mesh::chunk_tokens, py::arg("format"), py::arg("group_size"),
        py::arg("hidden"), py::arg("intermediate"), py::arg("gated"), py::arg("bias"),
        py::arg("top_k"), py::arg("workspace"));
  m.attr("MOST_THREADS") = torch_mesh::kMostThreads;
  m.attr("LONGEST_TIMEOUT") = torch_mesh::kLongestTimeout;
  m.attr("MOST_DECODE_ROWS") = torch_mesh::kMostDecodeRows;
  m.attr("HEAD_DIM_STEP") = torch_mesh::kHeadDimStep;
  m.attr("MOST_HEAD_DIM") = torch_mesh::kMostHeadDim;
  m.def("linear_bytes", torch_mesh::linear_bytes, py::arg("format"), py::arg("group_size"),
        py::arg("in_features"), py::arg("out_features"));
  m.def("record_checksum", torch_mesh::checksum, py::arg("store_id"), py::arg("layer"),
        py::arg("expert"), py::arg("record"));
  m.def("policy_names", torch_mesh::policies);
  torch_mesh::define_replay(m);
  torch_mesh::define_device(m);
  torch_mesh::define_product_time(m);
  m.def("direct_io_alignment", torch_mesh::direct_io_alignment, py::arg("path"));

  py::class_<PySource>(m, "Source")
      .def(py::init(&torch_mesh::make_source), py::arg("files"), py::arg("extents"),
           py::arg("checksums"), py::arg("store_id"), py::arg("raw_dtype") = py::none(),
           py::arg("raw_views") = py::none())
      .def_property_readonly("staging_bytes", [](const PySource& source) {
        return torch_mesh::PoolOptions{}.staging * torch_mesh::staging_bytes(source.source);
      });

  py::class_<PyEngine>(m, "Engine")
      .def(py::init<int32_t, int32_t, const std::string&, int32_t, int32_t, int32_t, bool, bool,
                    const std::optional<std::string>&, int32_t, const std::string&,
                    const std::string&, const std::string&, int32_t, int64_t, double,
                    const std::string&, const PySource*,
                    const std::optional<std::map<std::string, double>>&, int32_t,
                    const std::optional<torch_mesh::ProfileArrays>&, double, int32_t, int32_t, bool,
                    const std::vector<bool>&>(),
           py::kw_only(), py::arg("layers"), py::arg("experts"), py::arg("format"),
           py::arg("group_size"), py::arg("hidden"), py::arg("intermediate"), py::arg("gated"),
           py::arg("bias"), py::arg("activation"), py::arg("slots"), py::arg("policy"),
           py::arg("verify"), py::arg("io"), py::arg("threads"), py::arg("workspace"),
           py::arg("timeout"), py::arg("prefill") = "auto", py::arg("source"),
           py::arg("faults") = py::none(), py::arg("least_slots") = 1,
           py::arg("profile") = py::none(), py::arg("pins") = 0., py::arg("early_layers") = 0,
           py::arg("early_experts") = 0, py::arg("elsewhere") = std::vector<bool>())
      .def_property_readonly("id", &PyEngine::id)
      .def_property_readonly("generation", &PyEngine::generation)
      .def("fill", &PyEngine::fill, py::arg("layer"), py::arg("expert"), py::arg("record"))
      .def("read_record", &PyEngine::read_record, py::arg("layer"), py::arg("expert"))
      .def("sum_records", &PyEngine::sum_records, py::arg("layer"), py::arg("experts"))
      .def("stats", &PyEngine::stats)
      .def("detailed_stats", &PyEngine::detailed_stats)
      .def("reset_stats", &PyEngine::reset_stats)
      .def("model_use", &PyEngine::model_use)
      .def("warm_up", &PyEngine::warm_up)
      .def("forwards", &PyEngine::forwards, py::arg("layer"))
      .def("wait_for_forwards", &PyEngine::wait_for_forwards, py::arg("layer"), py::arg("forwards"),
           py::arg("patience"))
      .def("describe_size", &PyEngine::describe_size)
      .def("resize", &PyEngine::resize, py::arg("slots"))
      .def("pinned", &PyEngine::pinned)
      .def("validate", &PyEngine::validate)
      .def("drain", &PyEngine::drain)
      .def("close", &PyEngine::close, py::arg("wait") = true)
      .def("describe", &PyEngine::describe);
}
