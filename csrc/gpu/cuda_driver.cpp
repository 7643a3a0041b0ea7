// CUDA's driver API by name, so that neither its headers nor the library are needed to build, and
// one build serves machines with and without a GPU. Signatures and constants are those of cuda.h,
// which has kept them since CUDA 11.
#include <dlfcn.h>

#include <memory>
#include <string>
#include <utility>

#include "base/error.h"
#include "gpu/driver.h"

namespace torch_mesh {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

constexpr int kSuccess = 0;
constexpr int kNotReady = 600;
constexpr unsigned kStreamNonBlocking = 1;  // not synchronized with the default stream, torch's
constexpr unsigned kHostAllocPortable = 1;
constexpr unsigned kDisableTiming = 2;
constexpr int kThreadLocal = 1;     // captures of other threads do not restrict this one
constexpr int kMinVersion = 11000;  // the first with cuDevicePrimaryCtxRelease_v2

using Handle = void*;

// Field, symbol and parameters of each function. All return a CUresult.
#define TORCH_MESH_CUDA_FUNCTIONS(X)                                                    \
  X(init, "cuInit", (unsigned))                                                         \
  X(driver_version, "cuDriverGetVersion", (int*))                                       \
  X(error_name, "cuGetErrorName", (int, const char**))                                  \
  X(error_string, "cuGetErrorString", (int, const char**))                              \
  X(device_count, "cuDeviceGetCount", (int*))                                           \
  X(device_get, "cuDeviceGet", (int*, int))                                             \
  X(primary_retain, "cuDevicePrimaryCtxRetain", (Handle*, int))                         \
  X(primary_release, "cuDevicePrimaryCtxRelease_v2", (int))                             \
  X(context_push, "cuCtxPushCurrent_v2", (Handle))                                      \
  X(context_pop, "cuCtxPopCurrent_v2", (Handle*))                                       \
  X(stream_create, "cuStreamCreate", (Handle*, unsigned))                               \
  X(stream_destroy, "cuStreamDestroy_v2", (Handle))                                     \
  X(stream_wait_event, "cuStreamWaitEvent", (Handle, Handle, unsigned))                 \
  X(stream_synchronize, "cuStreamSynchronize", (Handle))                                \
  X(stream_is_capturing, "cuStreamIsCapturing", (Handle, int*))                         \
  X(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", (int*))                 \
  X(event_create, "cuEventCreate", (Handle*, unsigned))                                 \
  X(event_destroy, "cuEventDestroy_v2", (Handle))                                       \
  X(event_record, "cuEventRecord", (Handle, Handle))                                    \
  X(event_query, "cuEventQuery", (Handle))                                              \
  X(event_elapsed, "cuEventElapsedTime", (float*, Handle, Handle))                      \
  X(copy_down, "cuMemcpyDtoHAsync_v2", (void*, unsigned long long, size_t, Handle))     \
  X(copy_up, "cuMemcpyHtoDAsync_v2", (unsigned long long, const void*, size_t, Handle)) \
  X(launch_host, "cuLaunchHostFunc", (Handle, void (*)(void*), void*))                  \
  X(host_alloc, "cuMemHostAlloc", (void**, size_t, unsigned))                           \
  X(host_free, "cuMemFreeHost", (void*))

struct CudaTable {
#define TORCH_MESH_FIELD(name, symbol, arguments) int(*name) arguments = nullptr;
  TORCH_MESH_CUDA_FUNCTIONS(TORCH_MESH_FIELD)
#undef TORCH_MESH_FIELD
  int version = 0;
};

std::string words(const CudaTable& table, int result) {
  const char* name = nullptr;
  const char* meaning = nullptr;
  table.error_name(result, &name);
  table.error_string(result, &meaning);
  return std::string(name != nullptr ? name : "error " + std::to_string(result)) +
         (meaning != nullptr ? std::string(": ") + meaning : "");
}

[[noreturn]] void fail(const std::string& message) { throw Error(ErrorKind::kDevice, message); }

void check(const CudaTable& table, int result, const char* call) {
  if (result != kSuccess) fail(std::string(call) + " failed, " + words(table, result));
}

// The library is never closed: the driver has threads of its own.
CudaTable load(const char* library) {
  void* loaded = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (loaded == nullptr) fail(std::string("no CUDA driver: ") + dlerror());
  CudaTable table;
#define TORCH_MESH_LOAD(name, symbol, arguments)                                               \
  table.name = reinterpret_cast<decltype(table.name)>(dlsym(loaded, symbol));                  \
  if (table.name == nullptr) {                                                                 \
    fail(std::string(library) + " has no " symbol ": a driver of CUDA 11 or later is needed"); \
  }
  TORCH_MESH_CUDA_FUNCTIONS(TORCH_MESH_LOAD)
#undef TORCH_MESH_LOAD
  check(table, table.init(0), "cuInit");
  check(table, table.driver_version(&table.version), "cuDriverGetVersion");
  if (table.version < kMinVersion) {
    fail("the CUDA driver is of version " + std::to_string(table.version) +
         "; needed: " + std::to_string(kMinVersion) + " or later");
  }
  return table;
}

std::string version_text(int version) {
  return "CUDA driver " + std::to_string(version / 1000) + "." +
         std::to_string(version % 1000 / 10);
}

class CudaDriver final : public Driver {
 public:
  CudaDriver(CudaTable table, int32_t device) : table_(std::move(table)), number_(device) {
    int count = 0;
    check(table_, table_.device_count(&count), "cuDeviceGetCount");
    if (device < 0 || device >= count) {
      fail("there is no CUDA device " + std::to_string(device) + "; there are " +
           std::to_string(count));
    }
    check(table_, table_.device_get(&device_, device), "cuDeviceGet");
    check(table_, table_.primary_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
  }
  ~CudaDriver() override { table_.primary_release(device_); }

  std::string description() const override {
    return version_text(table_.version) + ", device " + std::to_string(number_);
  }
  std::optional<int32_t> device() const override { return number_; }

  Stream create_stream() override {
    Stream stream;
    call("cuStreamCreate", table_.stream_create, &stream.handle, kStreamNonBlocking);
    return stream;
  }
  Event create_event(bool timed) override {
    Event event;
    call("cuEventCreate", table_.event_create, &event.handle, timed ? 0U : kDisableTiming);
    return event;
  }
  void destroy(Stream stream) noexcept override { quietly(table_.stream_destroy, stream.handle); }
  void destroy(Event event) noexcept override { quietly(table_.event_destroy, event.handle); }

  void record(Event event, Stream stream) override {
    call("cuEventRecord", table_.event_record, event.handle, stream.handle);
  }
  void wait(Stream stream, Event event) override {
    call("cuStreamWaitEvent", table_.stream_wait_event, stream.handle, event.handle, 0U);
  }
  bool done(Event event) override {
    const Current current(*this);
    const int result = table_.event_query(event.handle);
    if (result != kNotReady) check(table_, result, "cuEventQuery");
    return result == kSuccess;
  }
  void synchronize(Stream stream) override {
    call("cuStreamSynchronize", table_.stream_synchronize, stream.handle);
  }
  std::optional<double> seconds_between(Event from, Event to) override {
    const Current current(*this);
    float milliseconds = 0;
    if (table_.event_elapsed(&milliseconds, from.handle, to.handle) != kSuccess)
      return std::nullopt;
    return milliseconds * 1e-3;
  }

  void copy_down(void* to, DeviceAddress from, int64_t bytes, Stream stream) override {
    call("cuMemcpyDtoHAsync", table_.copy_down, to, static_cast<unsigned long long>(from),
         static_cast<size_t>(bytes), stream.handle);
  }
  void copy_up(DeviceAddress to, const void* from, int64_t bytes, Stream stream) override {
    call("cuMemcpyHtoDAsync", table_.copy_up, static_cast<unsigned long long>(to), from,
         static_cast<size_t>(bytes), stream.handle);
  }
  void launch_host(Stream stream, void (*function)(void*), void* argument) override {
    call("cuLaunchHostFunc", table_.launch_host, stream.handle, function, argument);
  }

  void* allocate_pinned(int64_t bytes) override {
    void* memory = nullptr;
    call("cuMemHostAlloc", table_.host_alloc, &memory, static_cast<size_t>(bytes),
         kHostAllocPortable);
    return memory;
  }
  void free_pinned(void* memory) noexcept override { quietly(table_.host_free, memory); }

  bool capturing(Stream stream) override {
    int status = 0;
    call("cuStreamIsCapturing", table_.stream_is_capturing, stream.handle, &status);
    return status != 0;
  }

 private:
  // Makes the device's context current while it lives, on a thread that may use another one.
  class Current {
   public:
    explicit Current(const CudaDriver& driver) : table_(driver.table_) {
      check(table_, table_.context_push(driver.context_), "cuCtxPushCurrent");
      table_.exchange_capture_mode(&mode_);
    }
    ~Current() {
      table_.exchange_capture_mode(&mode_);
      Handle popped;
      table_.context_pop(&popped);
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const CudaTable& table_;
    int mode_ = kThreadLocal;
  };

  template <typename... Parameters, typename... Arguments>
  void call(const char* name, int (*function)(Parameters...), Arguments... arguments) const {
    const Current current(*this);
    check(table_, function(arguments...), name);
  }
  // For destructors. If the context is gone, so are its objects.
  template <typename Argument>
  void quietly(int (*function)(Argument), Argument argument) noexcept {
    try {
      const Current current(*this);
      function(argument);
    } catch (const Error&) {
    }
  }

  CudaTable table_;
  int32_t number_;
  int device_ = 0;
  Handle context_ = nullptr;
};

}  // namespace

std::shared_ptr<Driver> open_cuda_driver(int32_t device, const char* library) {
  return std::make_shared<CudaDriver>(load(library != nullptr ? library : kLibrary), device);
}

std::string describe_cuda_driver(const char* library) {
  try {
    return version_text(load(library != nullptr ? library : kLibrary).version);
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace torch_mesh
