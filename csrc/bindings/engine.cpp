#include "bindings/engine.h"

#include <ATen/Parallel.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "bindings/errors.h"
#include "bindings/keywords.h"
#include "bindings/profile.h"
#include "bindings/runtime.h"
#include "bindings/source.h"
#include "io/reader.h"
#include "kernels/kernel_table.h"
#include "residency/lending/lender.h"
#include "residency/lending/loan.h"

namespace torch_mesh {
namespace {

namespace py = pybind11;
using ByteArray = py::array_t<uint8_t, py::array::c_style>;

// -- options --------------------------------------------------------------------------------------

// torch's intra-op threads, but no more than an engine may have.
int32_t torch_threads() { return std::min(at::get_num_threads(), kMaxThreads); }

// Throws Error(kInvalid) below 1 ms (0 if `none_allowed`) and above kMaxTimeout.
double seconds_from(double seconds, const char* name, bool none_allowed) {
  if (seconds >= (none_allowed ? 0 : 1e-3) && seconds <= kMaxTimeout) return seconds;
  throw_invalid(name, " is ", seconds, " seconds; allowed: ", none_allowed ? "0" : "0.001", " to ",
                static_cast<int64_t>(kMaxTimeout));  // also for NaN
}

std::chrono::milliseconds milliseconds_from(double seconds, const char* name, bool none_allowed) {
  return std::chrono::milliseconds(
      static_cast<int64_t>(seconds_from(seconds, name, none_allowed) * 1e3));
}

Verify verify_from(const std::string& name) {
  if (name == "first") return Verify::kFirst;
  if (name == "always") return Verify::kAlways;
  if (name == "never") return Verify::kNever;
  throw_invalid("verify is '", name, "'; allowed: 'first', 'always', 'never'");
}

std::vector<RecordLayout> layouts_from(Keywords& given) {
  const auto formats = given.take<std::string>("format");
  const auto group_size = given.take<int32_t>("group_size");
  const auto hidden = given.take<int32_t>("hidden");
  const auto intermediate = given.take<int32_t>("intermediate");
  const auto gated = given.take<bool>("gated");
  return layouts_of_layers(formats, group_size, hidden, intermediate, gated,
                           given.take<bool>("bias"));
}

EngineOptions engine_options_from(Keywords& given) {
  std::vector<RecordLayout> layouts = layouts_from(given);
  EngineOptions options{.layout = largest(layouts)};
  if (layouts.size() > 1) options.layouts = std::move(layouts);
  using Names = std::variant<std::string, std::vector<std::string>>;
  if (const auto names = given.take<std::optional<Names>>("activation")) {
    const auto* of_all = std::get_if<std::string>(&*names);
    const auto of_each = of_all ? std::vector{*of_all} : std::get<std::vector<std::string>>(*names);
    if (of_each.empty()) throw_invalid("activation is an empty list; allowed: one for each layer");
    for (const std::string& name : of_each) {
      options.activations.push_back(activation_from_name(name));
    }
  }
  const auto threads = given.take<int32_t>("threads");
  options.threads = threads == 0 ? torch_threads() : threads;
  options.workspace = given.take<int64_t>("workspace");
  return options;
}

PoolOptions pool_options_from(Keywords& given, int64_t record_bytes) {
  PoolOptions options;
  options.slots = given.take<int32_t>("slots");
  options.min_slots = given.take<int32_t>("min_slots", 1);
  options.record_bytes = record_bytes;
  options.policy = given.take<std::string>("policy");
  options.soft_pins = soft_pin_options(given);
  options.warm_up = {.profile = profile_from(given),
                     .on_gpu = given.take<std::vector<bool>>("on_gpu", {}),
                     .fill = given.take<bool>("fill_empty", false)};
  options.prefill = prefill_from(given.take<std::string>("prefill", "auto"));
  options.verify = verify_from(given.take<std::string>("verify"));
  options.timeout = timeout_from(given.take<double>("timeout"));
  set_reader_io(given.take<std::string>("io"), options.reader);
  if (given.take<bool>("lendable", false)) options.sharing = Sharing::kShared;
  if (const auto* between = given.take<const PyInterpose*>("interpose", nullptr)) {
    options.reader.interpose = between->interpose;
  }
  return options;
}

// Takes the pool's slots from the process that lends them at `path`.
void borrow(const std::string& path, const Source& source, const Runtime& runtime,
            PoolOptions& pool) {
  pool.loan = std::make_shared<Loan>(path, source, pool.record_bytes, pool.timeout, runtime);
  pool.slots = pool.loan->slots();
  if (pool.slots >= pool.min_slots) return;
  throw_invalid("the pool at ", path, " lends each worker ", pool.slots,
                " experts, and a token of this model needs ", pool.min_slots,
                "; start torch-mesh share with a larger --resident or fewer --workers");
}

// -- queries --------------------------------------------------------------------------------------

// An int64 array of `shape` for each of `fields`.
template <typename Counts, size_t kFields>
py::dict dict_of(const std::vector<Counts>& counts,
                 const std::pair<const char*, int64_t Counts::*> (&fields)[kFields],
                 const std::vector<py::ssize_t>& shape) {
  py::dict result;
  for (const auto& [name, member] : fields) {
    py::array_t<int64_t> values(shape);
    int64_t* to = values.mutable_data();
    for (const Counts& each : counts) *to++ = each.*member;
    result[name] = values;
  }
  return result;
}

py::dict dict_of_layers(const std::vector<LayerStats>& layers) {
  return dict_of(layers, kLayerCounts, {std::ssize(layers)});
}

py::dict stats(const PyEngine& self) {
  return dict_of_layers(self.call([](Engine& engine) { return engine.pool().stats(); }));
}

std::map<std::string_view, int64_t> totals(const PyEngine& self) {
  const PoolTotals totals = self.call([](Engine& engine) { return engine.pool().totals(); });
  std::map<std::string_view, int64_t> result{{"resets", totals.resets}};
  for (const auto& [name, member] : kLayerCounts) result[name] = totals.counts.*member;
  return result;
}

py::dict detailed_stats(const PyEngine& self) {
  struct Seen {
    PoolStats stats;
    std::vector<py::ssize_t> shape;
    int32_t max_slots;
  };
  const auto [stats, shape, max_slots] = self.call([](Engine& engine) {
    const Pool& pool = engine.pool();
    return Seen{pool.detailed_stats(), {pool.layers(), pool.experts()}, pool.max_slots()};
  });
  py::dict result;
  for (const auto& [name, phase] : {std::pair{"none", Phase::kNone},
                                    {"prefill", Phase::kPrefill},
                                    {"decode", Phase::kDecode}}) {
    result[name] = dict_of_layers(stats.layers[static_cast<size_t>(phase)]);
  }
  result["experts"] = dict_of(stats.experts, kExpertCounts, shape);
  result["prefetch_error"] =
      stats.prefetch_error ? exception_of(*stats.prefetch_error) : py::object(py::none());
  result["slots"] = stats.slots;
  result["early"] = stats.early;
  result["max_slots"] = max_slots;
  result["shrinks"] = stats.shrinks;
  result["grows"] = stats.grows;
  result["resets"] = stats.resets;
  return result;
}

py::array_t<int64_t> misses(const PyEngine& self) {
  const auto found = self.call([](Engine& engine) { return engine.pool().misses(); });
  py::array_t<int64_t> result({std::ssize(found), py::ssize_t{7}});
  auto rows = result.mutable_unchecked<2>();
  for (py::ssize_t i = 0; i < std::ssize(found); ++i) {
    const Miss& miss = found[i];
    rows(i, 0) = miss.layer;
    rows(i, 1) = miss.expert;
    py::ssize_t column = 2;
    for (const auto time : {miss.claimed, miss.begun, miss.landed, miss.handed, miss.released}) {
      rows(i, column++) = std::chrono::nanoseconds(time.time_since_epoch()).count();
    }
  }
  return result;
}

ProfileArrays model_use(const PyEngine& self) {
  return profile_arrays(self.call([](Engine& engine) { return engine.pool().model_use(); }));
}

std::map<std::string, int64_t> sizes_of(Engine& engine) {
  const Pool& pool = engine.pool();
  return {{"slots", pool.slots()},
          {"min_slots", pool.min_slots()},
          {"max_slots", pool.max_slots()},
          {"segment_slots", pool.segment_slots()},
          {"record_bytes", engine.layout().bytes},
          {"slot_bytes", pool.slot_bytes()}};
}

using Fact = std::variant<int64_t, std::string, std::vector<std::string>>;
std::map<std::string, Fact> describe(Engine& engine) {
  const Pool& pool = engine.pool();
  const Reader* reader = pool.reader();
  return {{"slots", pool.slots()},
          {"max_slots", pool.max_slots()},
          {"record_bytes", engine.layout().bytes},
          {"pool_bytes", pool.memory_bytes()},
          {"workspace_bytes", engine.workspace_bytes()},
          {"policy", std::string(pool.policy())},
          {"io", reader == nullptr ? "memory" : reader->backend()},
          {"buffered", int64_t{reader != nullptr && reader->buffered()}},
          {"isa", std::string(kernel_table_name(kernel_table()))},
          {"threads", engine.options().threads},
          {"notes", reader == nullptr ? std::vector<std::string>{} : reader->notes()}};
}

void fill(const PyEngine& self, int32_t layer, int32_t expert, const ByteArray& record) {
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(record.data()),
                                         static_cast<size_t>(record.size()));
  self.call([&](Engine& engine) { engine.pool().fill(layer, expert, bytes); });
}

ByteArray read_record(const PyEngine& self, int32_t layer, int32_t expert) {
  ByteArray copy(self.call([](Engine& engine) { return engine.layout().bytes; }));
  const auto bytes = static_cast<size_t>(copy.size());
  uint8_t* to = copy.mutable_data();
  self.call([&](Engine& engine) {
    const Pool& pool = engine.pool();
    if (layer < 0 || layer >= pool.layers() || expert < 0 || expert >= pool.experts()) {
      throw_invalid("layer ", layer, ", expert ", expert, " is outside [0, ", pool.layers(),
                    ") x [0, ", pool.experts(), ")");
    }
    engine.visit(layer, {&expert, 1},
                 [&](int32_t, const std::byte* record) { std::memcpy(to, record, bytes); });
  });
  return copy;
}

// torch_mesh._C.Lender. Its engine's Python object lives as long (keep_alive below): when both are
// dropped, the lender has to go first.
class PyLender {
 public:
  PyLender(const PyEngine& engine, const std::string& path, int32_t workers)
      : live_(engine.live()) {
    const py::gil_scoped_release released;
    lender_ = std::make_unique<Lender>(live_->object->pool(), path, workers);
  }
  ~PyLender() { close(); }
  PyLender(const PyLender&) = delete;
  PyLender& operator=(const PyLender&) = delete;

  const Lender& lender() const {
    if (lender_ == nullptr) throw Error(ErrorKind::kClosed, "this lender is closed");
    return *lender_;
  }
  void close() {
    std::unique_ptr<Lender> lender = std::move(lender_);
    std::shared_ptr<Live<Engine>> live = std::move(live_);
    const py::gil_scoped_release released;
    lender.reset();
    live.reset();
  }

 private:
  std::shared_ptr<Live<Engine>> live_;
  std::unique_ptr<Lender> lender_;
};

// Makes a Python method that runs without the GIL.
template <typename Result, typename... Arguments>
auto method(Result (*function)(Engine&, Arguments...)) {
  return [function](const PyEngine& self, Arguments... arguments) {
    return self.call([&](Engine& engine) { return function(engine, arguments...); });
  };
}

}  // namespace

std::chrono::milliseconds timeout_from(double seconds) {
  return milliseconds_from(seconds, "timeout", /*none_allowed=*/false);
}

void set_reader_io(const std::string& io, ReaderOptions& reader) {
  reader.direct = io != "buffered";
  reader.backend = reader.direct ? io : "auto";
}

PrefillWindow prefill_from(const std::string& name) {
  if (name == "auto") return PrefillWindow::kAuto;
  if (name == "window") return PrefillWindow::kAlways;
  if (name == "off") return PrefillWindow::kNever;
  throw_invalid("prefill is '", name, "'; allowed: 'auto', 'window', 'off'");
}

PyEngine::PyEngine(const py::kwargs& options) : PyLive("this engine is closed") {
  Keywords given("Engine", options);
  const auto layers = given.take<int32_t>("layers");
  const auto experts = given.take<int32_t>("experts");
  const auto* source = given.take<const PySource*>("source");
  const EngineOptions engine = engine_options_from(given);
  PoolOptions pool = pool_options_from(given, engine.layout.bytes);
  const auto lender = given.take<std::optional<std::string>>("lender", {});
  given.none_left();

  py::gil_scoped_release released;
  const Runtime& runtime = torch_runtime();
  check(engine, runtime, layers);
  Owned<Pool> made;
  if (lender) {
    if (source == nullptr) {
      throw_invalid("a pool that is lent slots needs the source of its records");
    }
    borrow(*lender, source->source, runtime, pool);
  }
  if (source == nullptr) {
    made = make_owned<Pool>(pool, runtime, layers, experts);
  } else {
    const Source& records = source->source;
    if (records.layers != layers || records.experts != experts) {
      throw_invalid("the source has ", records.layers, " layers of ", records.experts,
                    " experts; the model ", layers, " of ", experts);
    }
    made = make_owned<Pool>(pool, runtime, records, source->packing(engine));
  }
  open(std::make_unique<Engine>(engine, runtime, std::move(made)));
}

bool PyEngine::wait_for_forwards(int32_t layer, int64_t forwards, double patience) const {
  if (closed()) return false;
  const auto milliseconds = milliseconds_from(patience, "patience", /*none_allowed=*/true);
  return call([&](Engine& engine) {
    return engine.pool().wait_for_forwards(layer, forwards, milliseconds);
  });
}

void PyEngine::close(bool wait) {
  if (!closed() && live()->object->pool().lent()) {
    throw_invalid(
        "this engine lends its slots, and their borrowers keep it; close its Lender first");
  }
  PyLive::close(wait);
}

void define_engine(py::module_& module) {
  py::class_<PyInterpose>(module, "Interpose");
  py::class_<PyEngine>(module, "Engine")
      .def(py::init<const py::kwargs&>())
      .def_property_readonly("id", &PyEngine::id)
      .def("fill", fill, py::arg("layer"), py::arg("expert"), py::arg("record"))
      .def("read_record", read_record, py::arg("layer"), py::arg("expert"))
      .def("stats", stats)
      .def("totals", totals)
      .def("detailed_stats", detailed_stats)
      .def("reset_stats", method(+[](Engine& engine) { engine.pool().reset_stats(); }))
      .def("record_misses",
           method(+[](Engine& engine, int32_t count) { engine.pool().record_misses(count); }),
           py::arg("count"))
      .def("misses", misses)
      .def("model_use", model_use)
      .def("warm_up", method(+[](Engine& engine) { engine.pool().warm_up(); }))
      .def("forwards",
           method(+[](Engine& engine, int32_t layer) { return engine.pool().forwards(layer); }),
           py::arg("layer"))
      .def("wait_for_forwards", &PyEngine::wait_for_forwards, py::arg("layer"), py::arg("forwards"),
           py::arg("patience"))
      .def("describe_size", method(sizes_of))
      .def("resize",
           method(+[](Engine& engine, int32_t slots) { return engine.pool().resize(slots); }),
           py::arg("slots"))
      .def("pinned", method(+[](Engine& engine) { return engine.pool().pinned(); }))
      .def("validate", method(+[](Engine& engine) { engine.pool().validate(); }))
      .def("drain", method(+[](Engine& engine) { engine.pool().drain(); }))
      .def("close", &PyEngine::close, py::arg("wait") = true)
      .def("describe", method(describe));
  py::class_<PyLender>(module, "Lender")
      .def(py::init<const PyEngine&, const std::string&, int32_t>(), py::arg("engine"),
           py::arg("path"), py::arg("workers"), py::keep_alive<1, 2>())
      .def_property_readonly("workers",
                             [](const PyLender& self) { return self.lender().borrowers(); })
      .def_property_readonly("slots", [](const PyLender& self) { return self.lender().slots(); })
      .def_property_readonly("refused",
                             [](const PyLender& self) { return self.lender().refused(); })
      .def("close", &PyLender::close);
}

}  // namespace torch_mesh
