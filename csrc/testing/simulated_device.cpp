#include "testing/simulated_device.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "base/error.h"

namespace torch_mesh {

using Clock = std::chrono::steady_clock;
using Operation = std::function<void()>;

// The captured operations of each stream, in order. Events are replaced by edges: a record has a
// number to which later waits refer.
class SimulatedDevice::Graph {
 public:
  struct Node {
    Operation operation = {};  // empty: one of these is set
    int32_t records = -1;
    int32_t waits = -1;
  };
  std::map<void*, std::vector<Node>> streams;
  int32_t records = 0;
};

namespace {

[[noreturn]] void fail(const std::string& message) {
  throw Error(ErrorKind::kDevice, "the simulated device: " + message);
}

// For each captured stream, by handle, how many of its operations come before some point.
using Progress = std::map<void*, int64_t>;

struct EventState {
  std::mutex mutex;
  std::condition_variable changed;
  int64_t recorded = 0;   // times
  int64_t completed = 0;  // the latest record that its stream has reached
  Clock::time_point at;
  std::optional<Progress> captured;  // set while its last record is part of a capture
  int32_t captured_record = -1;      // its number in the graph
};

// One stream: a thread and its queue.
class Worker {
 public:
  Worker(uint64_t seed, int32_t max_delay_us)
      : random_(seed), max_delay_us_(max_delay_us), thread_([this] { run(); }) {}
  ~Worker() {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void give(Operation operation) {
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back(std::move(operation));
    }
    changed_.notify_all();
  }
  void synchronize() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return queue_.empty() && !busy_; });
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return ending_ || !queue_.empty(); });
      if (queue_.empty()) return;
      Operation operation = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
      lock.unlock();
      if (max_delay_us_ > 0) {
        const auto delay = std::uniform_int_distribution(0, max_delay_us_)(random_);
        std::this_thread::sleep_for(std::chrono::microseconds(delay));
      }
      operation();
      operation = nullptr;
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Operation> queue_;
  bool busy_ = false;
  bool ending_ = false;
  std::minstd_rand random_;
  int32_t max_delay_us_;
  std::thread thread_;
};

class SimulatedDriver final : public SimulatedDevice {
 public:
  explicit SimulatedDriver(const SimulatedDeviceOptions& options) : options_(options) {
    workers_[nullptr] = new_worker();
  }

  std::string description() const override { return "simulated device"; }
  std::optional<int32_t> device() const override { return std::nullopt; }

  Stream create_stream() override {
    const std::lock_guard lock(mutex_);
    count_call("create_stream", /*in_capture=*/false);
    auto worker = new_worker();
    const Stream stream{worker.get()};
    workers_[stream.handle] = std::move(worker);
    return stream;
  }
  Event create_event(bool) override {
    const std::lock_guard lock(mutex_);
    count_call("create_event", /*in_capture=*/false);
    auto state = std::make_shared<EventState>();
    const Event event{state.get()};
    events_[event.handle] = std::move(state);
    return event;
  }
  void destroy(Stream stream) noexcept override {
    const std::lock_guard lock(mutex_);
    const auto found = workers_.find(stream.handle);
    if (found == workers_.end()) return;
    destroyed_.push_back(std::move(found->second));
    workers_.erase(found);
  }
  void destroy(Event event) noexcept override {
    const std::lock_guard lock(mutex_);
    events_.erase(event.handle);
  }

  void record(Event event, Stream stream) override {
    const std::lock_guard lock(mutex_);
    count_call("record", /*in_capture=*/true);
    const auto state = state_of(event);
    const std::lock_guard state_lock(state->mutex);
    if (captured(stream)) {
      state->captured = progress_[stream.handle];
      state->captured_record = capture_->records++;
      capture_->streams[stream.handle].push_back({.records = state->captured_record});
      return;
    }
    state->captured.reset();
    const int64_t turn = ++state->recorded;
    worker_of(stream).give([state, turn] {
      const std::lock_guard lock(state->mutex);
      state->completed = std::max(state->completed, turn);
      state->at = Clock::now();
      state->changed.notify_all();
    });
  }
  void wait(Stream stream, Event event) override {
    const std::lock_guard lock(mutex_);
    count_call("wait", /*in_capture=*/true);
    const auto state = state_of(event);
    const std::lock_guard state_lock(state->mutex);
    if (state->captured) {
      for (const auto& [other, reached] : *state->captured) {
        int64_t& own = progress_[stream.handle][other];
        own = std::max(own, reached);
      }
      capture_->streams[stream.handle].push_back({.waits = state->captured_record});
      return;
    }
    if (captured(stream)) fail("a stream that is captured waits for work that is not");
    const int64_t turn = state->recorded;
    worker_of(stream).give([state, turn] {
      std::unique_lock lock(state->mutex);
      state->changed.wait(lock, [&] { return state->completed >= turn; });
    });
  }
  bool done(Event event) override {
    const std::lock_guard lock(mutex_);
    count_call("done", /*in_capture=*/false);
    const auto state = state_of(event);
    const std::lock_guard state_lock(state->mutex);
    return state->completed == state->recorded;
  }
  void synchronize(Stream stream) override {
    std::shared_ptr<Worker> worker;
    {
      const std::lock_guard lock(mutex_);
      count_call("synchronize", /*in_capture=*/false);
      worker = workers_.at(stream.handle);
    }
    worker->synchronize();
  }
  std::optional<double> seconds_between(Event from, Event to) override {
    const std::lock_guard lock(mutex_);
    const auto first = state_of(from), second = state_of(to);
    const std::scoped_lock state_lock(first->mutex, second->mutex);
    for (const auto& state : {first, second}) {
      if (state->recorded == 0 || state->completed != state->recorded) return std::nullopt;
    }
    return std::chrono::duration<double>(second->at - first->at).count();
  }

  void copy_down(void* to, DeviceAddress from, int64_t bytes, Stream stream) override {
    give(stream, "copy_down", [=] { std::memcpy(to, reinterpret_cast<void*>(from), bytes); });
  }
  void copy_up(DeviceAddress to, const void* from, int64_t bytes, Stream stream) override {
    give(stream, "copy_up", [=] { std::memcpy(reinterpret_cast<void*>(to), from, bytes); });
  }
  void launch_host(Stream stream, void (*function)(void*), void* argument) override {
    give(stream, "launch_host", [=] { function(argument); });
  }

  void* allocate_pinned(int64_t bytes) override {
    const std::lock_guard lock(mutex_);
    count_call("allocate_pinned", /*in_capture=*/false);
    void* memory = std::malloc(static_cast<size_t>(bytes));
    if (memory == nullptr) fail("out of memory");
    pinned_.insert(memory);
    return memory;
  }
  void free_pinned(void* memory) noexcept override {
    std::vector<std::shared_ptr<Worker>> workers;
    {
      const std::lock_guard lock(mutex_);
      if (pinned_.erase(memory) == 0) return;
      if (options_.failing_call < 0) {
        std::free(memory);
        return;
      }
      // On a failed device the freeing thread could not wait. Here the streams still run, so it
      // waits.
      workers = destroyed_;
      for (const auto& [handle, worker] : workers_) workers.push_back(worker);
    }
    for (const auto& worker : workers) worker->synchronize();
    std::free(memory);
  }

  bool capturing(Stream stream) override {
    const std::lock_guard lock(mutex_);
    count_call("capturing", /*in_capture=*/true);
    return captured(stream);
  }

  void begin_capture(Stream stream) override {
    const std::lock_guard lock(mutex_);
    if (capture_) fail("a capture is under way");
    capture_ = std::make_shared<Graph>();
    capturing_thread_ = std::this_thread::get_id();
    progress_[stream.handle] = {{stream.handle, 0}};
  }
  std::shared_ptr<const Graph> end_capture(Stream stream) override {
    const std::lock_guard lock(mutex_);
    const auto progress = std::exchange(progress_, {});
    const auto graph = std::exchange(capture_, nullptr);
    if (graph == nullptr || !progress.contains(stream.handle)) fail("this stream is not captured");
    const Progress& reached = progress.at(stream.handle);
    for (const auto& [other, own] : progress) {
      const auto found = reached.find(other);
      if (found == reached.end() || found->second < own.at(other)) {
        fail("a capture ends before work of another stream that belongs to it is waited for");
      }
    }
    for (const auto& [handle, state] : events_) {
      const std::lock_guard state_lock(state->mutex);
      state->captured.reset();
    }
    return graph;
  }
  void launch(std::shared_ptr<const Graph> graph, Stream stream) override {
    give(stream, "launch", [this, graph] { replay(*graph); });
  }

  int64_t calls() const override {
    const std::lock_guard lock(mutex_);
    return calls_;
  }
  int64_t live() const override {
    const std::lock_guard lock(mutex_);
    return static_cast<int64_t>(workers_.size() - 1 + events_.size() + pinned_.size());
  }

 private:
  // Streams of a graph run in parallel too, except for its edges.
  void replay(const Graph& graph) const {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<bool> recorded(static_cast<size_t>(graph.records), false);
    std::vector<std::unique_ptr<Worker>> workers;
    for (const auto& [stream, nodes] : graph.streams) {
      workers.push_back(
          std::make_unique<Worker>(options_.seed + workers.size(), options_.max_delay_us));
      for (const Graph::Node& node : nodes) {
        workers.back()->give([&] {
          if (node.operation) return node.operation();
          std::unique_lock lock(mutex);
          if (node.records >= 0) {
            recorded[node.records] = true;
            changed.notify_all();
          } else {
            changed.wait(lock, [&] { return recorded[node.waits]; });
          }
        });
      }
    }
    workers.clear();  // each ends with its work
  }

  std::shared_ptr<Worker> new_worker() {
    return std::make_shared<Worker>(options_.seed + ++workers_made_, options_.max_delay_us);
  }
  bool captured(Stream stream) const {
    return capture_ != nullptr && progress_.contains(stream.handle);
  }
  // Counts a call, and fails it if the options or a capture require that. mutex_ is held.
  void count_call(const char* name, bool in_capture) {
    const int64_t failing = options_.failing_call;
    const int64_t turn = calls_++;
    if (failing >= 0 && turn >= failing && turn < failing + options_.failures) {
      fail(std::string(name) + " failed as it was told to");
    }
    if (capture_ != nullptr && capturing_thread_ == std::this_thread::get_id() && !in_capture) {
      fail(std::string(name) + " during a capture");
    }
  }
  void give(Stream stream, const char* name, Operation operation) {
    const std::lock_guard lock(mutex_);
    count_call(name, /*in_capture=*/true);
    if (captured(stream)) {
      capture_->streams[stream.handle].push_back({.operation = std::move(operation)});
      ++progress_[stream.handle][stream.handle];
      return;
    }
    worker_of(stream).give(std::move(operation));
  }
  Worker& worker_of(Stream stream) {
    const auto found = workers_.find(stream.handle);
    if (found == workers_.end()) fail("there is no such stream");
    return *found->second;
  }
  std::shared_ptr<EventState> state_of(Event event) const {
    const auto found = events_.find(event.handle);
    if (found == events_.end()) fail("there is no such event");
    return found->second;
  }

  const SimulatedDeviceOptions options_;
  mutable std::mutex mutex_;
  int64_t calls_ = 0;
  uint64_t workers_made_ = 0;
  std::map<void*, std::shared_ptr<EventState>> events_;
  std::set<void*> pinned_;
  std::shared_ptr<Graph> capture_;
  std::thread::id capturing_thread_;
  std::map<void*, Progress> progress_;  // of the streams that are captured
  // Their pending work still runs, as on a device.
  std::vector<std::shared_ptr<Worker>> destroyed_;
  std::map<void*, std::shared_ptr<Worker>> workers_;
};

}  // namespace

std::shared_ptr<SimulatedDevice> make_simulated_device(const SimulatedDeviceOptions& options) {
  return std::make_shared<SimulatedDriver>(options);
}

}  // namespace torch_mesh
