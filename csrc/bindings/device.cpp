#include "bindings/device.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/owner_process.h"
#include "bindings/errors.h"
#include "bindings/registry.h"
#include "bindings/tensors.h"
#include "gpu/experimental/mover.h"
#include "gpu/experimental/uplift.h"
#include "gpu/host_share.h"
#include "gpu/live_engine.h"

namespace torch_mesh {
namespace {

namespace py = pybind11;

DeviceAddress address(const at::Tensor& tensor) {
  return reinterpret_cast<DeviceAddress>(tensor.const_data_ptr());
}

// torch.cuda.Stream.cuda_stream
Stream stream_from(uintptr_t handle) { return {reinterpret_cast<void*>(handle)}; }

// On a simulated device torch's next operations are in no stream, so the thread itself waits.
void settle(Driver& driver, Stream stream) {
  if (!driver.device()) driver.synchronize(stream);
}

// `device` is that of the host share: a CUDA index, or none for the CPU.
void check_dense(const at::Tensor& tensor, const char* name, std::optional<int32_t> device,
                 at::ScalarType type, at::IntArrayRef sizes) {
  const bool here = device ? tensor.is_cuda() && tensor.get_device() == *device : tensor.is_cpu();
  TORCH_CHECK_VALUE(here, name, " is on ", tensor.device(), "; the layer's experts lie on ",
                    device ? "cuda:" + std::to_string(*device) : "the CPU");
  TORCH_CHECK_VALUE(
      tensor.scalar_type() == type && tensor.sizes() == sizes && tensor.is_contiguous(), name,
      " must be a contiguous tensor of ", type, " ", sizes, "; got ", tensor.scalar_type(), " ",
      tensor.sizes());
}

constexpr const char* kWhose = "what this pool does on a device";

// The mover that is told of the routing that host nodes see. Host nodes call it under the lock and
// do not own it: a mover must not be destroyed on a thread of the driver.
struct Following {
  std::mutex mutex;
  Mover* mover = nullptr;
};

class PyHostShare {
 public:
  PyHostShare(const at::Tensor& handle, std::shared_ptr<Driver> driver)
      : driver_(std::move(driver)) {
    const std::shared_ptr<Live<Engine>> live = resolve(handle).live;
    py::gil_scoped_release released;
    engine_ = std::shared_ptr<Engine>(live, live->object.get());
    share_ = std::make_unique<HostShare>(
        driver_, engine_,
        [following = following_](int32_t layer, std::span<const int64_t> ids, int32_t top_k) {
          const std::lock_guard lock(following->mutex);
          if (following->mover != nullptr) following->mover->used(layer, ids, top_k);
        });
  }
  ~PyHostShare() {
    if (process_.forked()) {  // its threads exist only in the parent
      static_cast<void>(share_.release());
      static_cast<void>(new std::shared_ptr<Driver>(std::move(driver_)));
      return;
    }
    py::gil_scoped_release released;
    share_.reset();
    driver_.reset();
  }
  PyHostShare(const PyHostShare&) = delete;
  PyHostShare& operator=(const PyHostShare&) = delete;

  int32_t submit(const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights,
                 const at::Tensor& table, const at::Tensor& out, int32_t layer, bool sentinels,
                 uintptr_t stream) {
    HostShare& share = this->share();
    const std::shared_ptr<Engine> live = live_engine(engine_);
    Engine& engine = *live;
    TORCH_CHECK_VALUE(x.dim() == 2 && x.size(0) > 0 && x.is_contiguous(),
                      "x must be contiguous [tokens, hidden], not empty; got ", x.sizes());
    TORCH_CHECK_VALUE(ids.dim() == 2 && ids.size(1) > 0, "topk_ids must be [tokens, k]; got ",
                      ids.sizes());
    TORCH_CHECK_VALUE(layer >= 0 && layer < engine.pool().layers(), "layer is ", layer,
                      "; allowed: [0, ", engine.pool().layers(), ")");
    const int64_t tokens = x.size(0), hidden = engine.layout().hidden;
    const std::optional<int32_t> device = driver_->device();
    check_dense(x, "x", device, x.scalar_type(), {tokens, hidden});
    check_dense(ids, "topk_ids", device, at::kLong, {tokens, ids.size(1)});
    check_dense(weights, "topk_weights", device, at::kFloat, {tokens, ids.size(1)});
    check_dense(table, "table", device, at::kInt, {engine.pool().experts()});
    check_dense(out, "out", device, at::kFloat, {tokens, hidden});
    const DeviceCall call{.layer = layer,
                          .tokens = clamped_to_int32(tokens),
                          .top_k = clamped_to_int32(ids.size(1)),
                          .x = address(x),
                          .x_type = scalar_type(x, "x"),
                          .ids = address(ids),
                          .weights = address(weights),
                          .table = address(table),
                          .out = reinterpret_cast<DeviceAddress>(out.mutable_data_ptr()),
                          .sentinels = sentinels};
    int32_t ticket = 0;
    {
      py::gil_scoped_release released;
      ticket = share.submit(call, stream_from(stream));
    }
    // torch must not reuse their memory before the copies from and to it have run.
    held_[ticket] = {x, ids, weights, table, out};
    return ticket;
  }

  void join(int32_t ticket, uintptr_t stream) {
    HostShare& share = this->share();
    {
      py::gil_scoped_release released;
      share.join(ticket, stream_from(stream));
      settle(*driver_, stream_from(stream));
    }
    held_.erase(ticket);
  }

  // Throws Error(kForked) in a child of the process that made it.
  HostShare& share() const {
    process_.check(kWhose);
    return *share_;
  }
  const std::shared_ptr<Driver>& driver() const { return driver_; }
  const std::weak_ptr<Engine>& engine() const { return engine_; }
  const std::shared_ptr<Following>& following() const { return following_; }

 private:
  OwnerProcess process_;
  std::map<int32_t, std::array<at::Tensor, 5>>
      held_;  // the tensors of calls that are not joined; under the GIL
  std::shared_ptr<Driver> driver_;
  std::weak_ptr<Engine> engine_;
  const std::shared_ptr<Following> following_ = std::make_shared<Following>();
  std::unique_ptr<HostShare> share_;
};

// Makes a Python method that checks for a fork and releases the GIL.
template <typename Result, typename... Arguments>
auto method(Result (HostShare::*function)(Arguments...)) {
  return [function](const PyHostShare& self, Arguments... arguments) {
    HostShare& share = self.share();
    const py::gil_scoped_release released;
    return (share.*function)(arguments...);
  };
}

std::map<std::string, std::variant<int64_t, double>> stats(const PyHostShare& self) {
  const HostShareStats stats = method(&HostShare::stats)(self);
  return {{"calls", stats.calls},
          {"all_on_device", stats.all_on_device},
          {"failed", stats.failed},
          {"bytes_down", stats.bytes_down},
          {"bytes_up", stats.bytes_up},
          {"node_seconds", stats.node_seconds},
          {"waited_seconds", stats.waited_seconds},
          {"waited_calls", stats.waited_calls}};
}

class PyMover {
 public:
  PyMover(PyHostShare& share, const at::Tensor& source, const at::Tensor& records,
          const at::Tensor& table, const std::vector<int32_t>& slots_of,
          const std::vector<bool>& moving, int32_t batch, const std::string& policy,
          int32_t patience)
      : share_(share), records_(records), table_(table) {
    const std::shared_ptr<Live<Engine>> live = resolve(source).live;
    TORCH_CHECK_VALUE(records.dim() == 2, "records must be [slots, record bytes]; got ",
                      records.sizes());
    const std::optional<int32_t> device = share.driver()->device();
    check_dense(records, "records", device, at::kByte,
                {records.size(0), live->object->layout().bytes});
    const auto layers = static_cast<int64_t>(moving.size());
    TORCH_CHECK_VALUE(layers > 0 && slots_of.size() % moving.size() == 0, "slots_of has ",
                      slots_of.size(), " entries for ", layers, " layers");
    check_dense(table, "table", device, at::kInt,
                {layers, static_cast<int64_t>(slots_of.size()) / layers});
    const MoverOptions options{
        .source = std::shared_ptr<Engine>(live, live->object.get()),
        .records = address(records),
        .table = address(table),
        .slots = clamped_to_int32(records.size(0)),
        .slots_of = slots_of,
        .moving = moving,
        .batch = batch,
        .policy = policy,
        .patience = patience,
        .before_switch = [&share](Stream stream) { share.share().follow_inputs(stream); }};
    py::gil_scoped_release released;
    mover_ = std::make_unique<Mover>(share.driver(), share.engine(), options);
    follow(mover_.get());
  }
  ~PyMover() {
    if (process_.forked()) {
      static_cast<void>(mover_.release());
      return;
    }
    py::gil_scoped_release released;
    follow(nullptr);
    mover_.reset();
  }
  PyMover(const PyMover&) = delete;
  PyMover& operator=(const PyMover&) = delete;

  int32_t step(uintptr_t stream) {
    py::gil_scoped_release released;
    process_.check(kWhose);
    const int32_t entered = mover_->step(stream_from(stream));
    settle(*share_.driver(), stream_from(stream));
    return entered;
  }
  void move(const std::vector<ExpertId>& up, const std::vector<ExpertId>& down, uintptr_t stream) {
    py::gil_scoped_release released;
    process_.check(kWhose);
    mover_->move(up, down, stream_from(stream));
    settle(*share_.driver(), stream_from(stream));
  }
  std::vector<int32_t> slots_of() const {
    process_.check(kWhose);
    py::gil_scoped_release released;
    return mover_->slots_of();
  }
  py::dict stats() const {
    process_.check(kWhose);
    MoverStats stats;
    {
      py::gil_scoped_release released;
      stats = mover_->stats();
    }
    py::dict result;
    result["moved_up"] = stats.moved_up;
    result["batches"] = stats.batches;
    result["bytes_up"] = stats.bytes_up;
    result["failed"] = stats.failed;
    result["last_failure"] = py::none();
    if (stats.last_failure != nullptr) {
      try {
        std::rethrow_exception(stats.last_failure);
      } catch (const Error& error) {
        result["last_failure"] = exception_of(error);
      } catch (const std::bad_alloc& error) {
        result["last_failure"] = exception_of(Error(ErrorKind::kMemory, error.what()));
      } catch (const std::exception& error) {
        result["last_failure"] = exception_of(Error(ErrorKind::kDevice, error.what()));
      }
    }
    return result;
  }

 private:
  void follow(Mover* mover) {
    Following& following = *share_.following();
    const std::lock_guard lock(following.mutex);
    following.mover = mover;
  }

  OwnerProcess process_;
  PyHostShare& share_;          // outlives this: see keep_alive below
  at::Tensor records_, table_;  // kept while copies may write to them
  std::unique_ptr<Mover> mover_;
};

class PyUplift {
 public:
  PyUplift(const PyHostShare& share, const at::Tensor& first, const at::Tensor& second,
           uintptr_t stream)
      : driver_(share.driver()), buffers_{first, second} {
    const std::shared_ptr<Engine> live = live_engine(share.engine());
    const int64_t record_bytes = live->layout().bytes;
    TORCH_CHECK_VALUE(first.dim() == 2 && first.size(0) > 0,
                      "a buffer must be [records, record bytes]; got ", first.sizes());
    check_dense(first, "the first buffer", driver_->device(), at::kByte,
                {first.size(0), record_bytes});
    check_dense(second, "the second buffer", driver_->device(), at::kByte, first.sizes());
    const int32_t batch = clamped_to_int32(first.size(0));
    py::gil_scoped_release released;
    uplift_ = std::make_unique<Uplift>(driver_, share.engine(),
                                       std::array{address(first), address(second)}, batch,
                                       stream_from(stream));
  }
  ~PyUplift() {
    if (process_.forked()) {
      static_cast<void>(uplift_.release());
      static_cast<void>(new std::shared_ptr<Driver>(std::move(driver_)));
      return;
    }
    py::gil_scoped_release released;
    uplift_.reset();
    driver_.reset();
  }
  PyUplift(const PyUplift&) = delete;
  PyUplift& operator=(const PyUplift&) = delete;

  int32_t batch() const { return uplift_->batch(); }
  int64_t bytes_up() const { return uplift_->bytes_up(); }
  Uplift& uplift() {
    process_.check(kWhose);
    return *uplift_;
  }
  bool forked() const { return process_.forked(); }
  Driver& driver() const { return *driver_; }

 private:
  OwnerProcess process_;
  std::shared_ptr<Driver> driver_;
  std::array<at::Tensor, 2> buffers_;  // kept while copies may write to them
  std::unique_ptr<Uplift> uplift_;
};

// Uplift::Turn as a context manager, on the thread that enters it.
class PyTurn {
 public:
  PyTurn(PyUplift& uplift, uintptr_t stream) : uplift_(uplift), stream_(stream_from(stream)) {}
  ~PyTurn() { exit(); }
  PyTurn(const PyTurn&) = delete;
  PyTurn& operator=(const PyTurn&) = delete;

  void enter() {
    TORCH_CHECK_VALUE(!turn_, "this turn is taken already");
    py::gil_scoped_release released;
    turn_ = std::make_unique<Uplift::Turn>(uplift_.uplift(), stream_);
  }
  void exit() {
    if (uplift_.forked()) static_cast<void>(turn_.release());  // it is the parent's
    py::gil_scoped_release released;
    turn_.reset();
  }
  int32_t bring(int32_t layer, const std::vector<int32_t>& experts) {
    static_cast<void>(uplift_.uplift());  // throws in a forked child, which has no turn
    TORCH_CHECK_VALUE(turn_, "bring() belongs within `with uplift.turn(stream)`");
    py::gil_scoped_release released;
    const int32_t buffer = turn_->bring(layer, experts);
    settle(uplift_.driver(), stream_);
    return buffer;
  }

 private:
  PyUplift& uplift_;
  Stream stream_;
  std::unique_ptr<Uplift::Turn> turn_;
};

}  // namespace

void define_device(py::module_& module) {
  module.def(
      "cuda_driver", [] { return describe_cuda_driver(); },
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "open_cuda_driver", [](int32_t device) { return open_cuda_driver(device); },
      py::arg("device"), py::call_guard<py::gil_scoped_release>());
  py::class_<Driver, std::shared_ptr<Driver>>(module, "Driver")
      .def("__str__", &Driver::description);
  py::class_<PyHostShare>(module, "HostShare")
      .def(py::init<const at::Tensor&, std::shared_ptr<Driver>>(), py::arg("handle"),
           py::arg("driver").none(false))
      .def("submit", &PyHostShare::submit, py::arg("x"), py::arg("topk_ids"),
           py::arg("topk_weights"), py::arg("table"), py::arg("out"), py::arg("layer"),
           py::arg("sentinels"), py::arg("stream"))
      .def("join", &PyHostShare::join, py::arg("ticket"), py::arg("stream"))
      .def("wait", method(&HostShare::wait), py::arg("ticket"))
      .def("synchronize", method(&HostShare::synchronize))
      .def("check", method(&HostShare::check))
      .def(
          "set_capture_sizes",
          [](const PyHostShare& self, const std::vector<int32_t>& tokens, int32_t top_k) {
            HostShare& share = self.share();
            const py::gil_scoped_release released;
            share.set_capture_sizes(tokens, top_k);
          },
          py::arg("tokens"), py::arg("top_k"))
      .def("capture_sizes", method(&HostShare::capture_sizes))
      .def("stats", stats)
      .def("reset_stats", method(&HostShare::reset_stats));
  py::class_<PyUplift>(module, "Uplift")
      .def(py::init<const PyHostShare&, const at::Tensor&, const at::Tensor&, uintptr_t>(),
           py::arg("share"), py::arg("first"), py::arg("second"), py::arg("stream"))
      .def_property_readonly("batch", &PyUplift::batch)
      .def("bytes_up", &PyUplift::bytes_up)
      .def(
          "turn",
          [](PyUplift& uplift, uintptr_t stream) {
            return std::make_unique<PyTurn>(uplift, stream);
          },
          py::arg("stream"), py::keep_alive<0, 1>());
  py::class_<PyTurn>(module, "Turn")
      .def("__enter__",
           [](py::object turn) {
             turn.cast<PyTurn&>().enter();
             return turn;
           })
      .def("__exit__", [](PyTurn& turn, const py::args&) { turn.exit(); })
      .def("bring", &PyTurn::bring, py::arg("layer"), py::arg("experts"));
  py::class_<PyMover>(module, "Mover")
      .def(py::init<PyHostShare&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                    const std::vector<int32_t>&, const std::vector<bool>&, int32_t,
                    const std::string&, int32_t>(),
           py::arg("share"), py::arg("source"), py::arg("records"), py::arg("table"),
           py::arg("slots_of"), py::arg("moving"), py::kw_only(), py::arg("batch"),
           py::arg("policy"), py::arg("patience"), py::keep_alive<1, 2>())
      .def("step", &PyMover::step, py::arg("stream"))
      .def("move", &PyMover::move, py::arg("up"), py::arg("down"), py::arg("stream"))
      .def("slots_of", &PyMover::slots_of)
      .def("stats", &PyMover::stats);
}

}  // namespace torch_mesh
