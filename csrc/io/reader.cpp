#include "io/reader.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <exception>
#include <limits>
#include <mutex>
#include <new>
#include <optional>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/owner_process.h"
#include "base/short_slices.h"
#include "base/start_thread.h"
#include "io/backend.h"
#include "io/chunk_scheduler.h"
#include "io/file_table.h"

namespace torch_mesh {

namespace {

// The longest wait, so that a lost wake-up costs this much and does not hang the process.
constexpr std::chrono::microseconds kMaxWait{500'000};
constexpr size_t kReservedMessages = 4096;
constexpr int64_t kChunkUnit = 4096;
constexpr int64_t kMaxChunk = int64_t{1} << 30;

struct BufferChange {
  MemoryRegion buffer;
  bool attached;
  Reader::Then then;
};

class EngineReader final : public Reader {
 public:
  EngineReader(const ReaderOptions& options, std::shared_ptr<const FileTable> files,
               std::unique_ptr<Backend> backend, Done done, bool buffered,
               std::vector<std::string> notes)
      : files_(std::move(files)),
        buffered_(buffered),
        notes_(std::move(notes)),
        backend_(std::move(backend)),
        done_(std::move(done)),
        scheduler_(backend_->capacity(), options.chunk_bytes, files_->alignment(), options.retries,
                   options.max_bytes_under_way, files_->copies()),
        results_(backend_->capacity()) {
    thread_ = start_thread("the I/O thread", [this] { run(); });
  }

  ~EngineReader() override {
    end();
    thread_.join();
  }

  // Waits until the backend's start() has returned, and throws what it threw.
  void wait_until_started() {
    std::unique_lock lock(mutex_);
    life_changed_.wait(lock, [this] { return life_ != Life::kStarting; });
    if (start_error_) std::rethrow_exception(start_error_);
  }

  void submit(std::span<const ReadRequest> requests) override {
    owner_.check("this reader");
    for (const ReadRequest& request : requests) check(request);
    const std::lock_guard lock(mutex_);
    if (life_ != Life::kRunning) throw_closed();
    inbox_.requests.insert(inbox_.requests.end(), requests.begin(), requests.end());
  }

  void raise_priority(uint64_t tag) override {
    if (owner_.forked()) return;
    const std::lock_guard lock(mutex_);
    if (life_ == Life::kRunning) inbox_.raised.push_back(tag);
  }

  bool buffered() const override { return buffered_; }

  void will_need(const Extent& extent) override {
    if (owner_.forked()) return;
    const std::lock_guard lock(mutex_);
    if (life_ != Life::kRunning || inbox_.predicted.size() == kReservedMessages) return;
    inbox_.predicted.push_back(extent);
  }

  void forget(const Extent& extent) override { files_->forget(extent); }

  void change_buffer(const MemoryRegion& buffer, bool attached, Then then) override {
    owner_.check("this reader");
    {
      const std::lock_guard lock(mutex_);
      if (life_ != Life::kRunning) throw_closed();
      inbox_.buffers.push_back({buffer, attached, std::move(then)});
    }
    flush();
  }

  // The backend may have stopped by then: it still accepts a wake-up.
  void flush() override {
    if (owner_.forked()) return;
    {
      const std::lock_guard lock(mutex_);
      if (inbox_.empty() || std::exchange(awake_, true)) return;
    }
    backend_->wake();
  }

  void close() override {
    if (owner_.forked()) return;
    if (std::this_thread::get_id() == thread_.get_id()) {
      throw_invalid(
          "close() was called from the completion callback, which it would wait for; call it from "
          "another thread");
    }
    end();
  }

  const char* backend() const override { return backend_->name(); }
  int64_t alignment() const override { return files_->alignment(); }
  std::vector<std::string> notes() const override {
    std::vector<std::string> all = notes_;
    if (owner_.forked()) return all;
    const std::lock_guard lock(mutex_);
    all.insert(all.end(), backend_notes_.begin(), backend_notes_.end());
    return all;
  }

 private:
  enum class Life : uint8_t { kStarting, kRunning, kClosing, kClosed };

  struct Messages {
    std::vector<ReadRequest> requests;
    std::vector<uint64_t> raised;
    std::vector<BufferChange> buffers;
    std::vector<Extent> predicted;

    Messages() {
      requests.reserve(kReservedMessages);
      raised.reserve(kReservedMessages);
      predicted.reserve(kReservedMessages);
    }
    bool empty() const {
      return requests.empty() && raised.empty() && buffers.empty() && predicted.empty();
    }
  };

  [[noreturn]] static void throw_closed() {
    throw Error(ErrorKind::kClosed, "the reader is closed; open another one");
  }

  template <typename... Parts>
  [[noreturn]] static void refuse(const Parts&... parts) {
    throw_invalid("a read request ", parts...);
  }

  void check(const ReadRequest& request) const {
    if (request.pieces < 1 || request.pieces > kMaxPieces) {
      refuse("has ", request.pieces, " pieces; 1 to ", kMaxPieces, " are allowed");
    }
    if (static_cast<uint32_t>(request.tag) >= kMaxTags) {
      refuse("has tag ", request.tag, "; its low 32 bits must be below ", kMaxTags);
    }
    for (int32_t piece = 0; piece < request.pieces; ++piece) check(request.piece[piece]);
  }

  void check(const Piece& piece) const {
    const Extent& from = piece.from;
    const int64_t files = files_->files();
    if (from.file < 0 || from.file >= files) {
      refuse("names file ", from.file, "; the reader has files 0 to ", files - 1);
    }
    if (from.offset < 0 || from.bytes < 1 ||
        from.bytes > std::numeric_limits<int64_t>::max() - from.offset) {
      refuse("asks for ", from.bytes, " bytes at offset ", from.offset,
             "; an offset is 0 or more and a length 1 or more");
    }
    if (piece.needed < 1 || piece.needed > from.bytes) {
      refuse("needs ", piece.needed, " of ", from.bytes,
             " bytes; it must need 1 or more and at most all");
    }
    if (piece.to == nullptr) refuse("has no memory to read into");
    const int64_t unit = files_->alignment();
    const auto to = reinterpret_cast<uintptr_t>(piece.to);
    if (from.offset % unit != 0 || from.bytes % unit != 0 || to % unit != 0) {
      refuse("asks for ", from.bytes, " bytes at offset ", from.offset, " into ", to,
             "; with direct I/O all three must be multiples of ", unit);
    }
  }

  // Ends the I/O thread.
  void end() {
    {
      const std::lock_guard lock(mutex_);
      if (life_ == Life::kRunning) life_ = Life::kClosing;
      awake_ = true;
    }
    backend_->wake();
    std::unique_lock lock(mutex_);
    life_changed_.wait(lock, [this] { return life_ == Life::kClosed; });
  }

  void set_life(Life life) {
    const std::lock_guard lock(mutex_);
    life_ = life;
    life_changed_.notify_all();
  }

  void run() {
    pthread_setname_np(pthread_self(), "mesh-io");
    try {
      backend_->start();
      // Otherwise a read that a forward asks for would begin only when the forward has run out of
      // work.
      ask_for_short_slices();  // after start(): the backend's own threads must not inherit them
    } catch (...) {
      start_error_ = std::current_exception();
      set_life(Life::kClosed);
      return;
    }
    copy_notes();
    set_life(Life::kRunning);
    for (;;) {
      const bool closing = take_messages();
      start_chunks();
      // After the reads have begun, since forwards may wait for them: the time of this call grows
      // with the number of pages.
      for (const Extent& extent : taken_.predicted) files_->will_need(extent);
      taken_.predicted.clear();
      report_finished();
      if (closing && scheduler_.idle()) break;
      if (!may_sleep()) continue;
      const int32_t count = backend_->wait(kMaxWait, results_);
      for (const ChunkResult& result : std::span(results_).first(count)) {
        scheduler_.complete(result.chunk, result.result, result.final);
      }
    }
    backend_->stop();
    set_life(Life::kClosed);
  }

  // Returns whether the reader closes.
  bool take_messages() {
    bool closing;
    {
      const std::lock_guard lock(mutex_);
      std::swap(inbox_, taken_);
      awake_ = true;
      closing = life_ == Life::kClosing;
    }
    for (const ReadRequest& request : taken_.requests) add(request);
    for (const uint64_t tag : taken_.raised) scheduler_.raise_priority(tag);
    taken_.requests.clear();
    taken_.raised.clear();
    for (const BufferChange& change : taken_.buffers) carry_out(change);
    taken_.buffers.clear();
    if (closing) {
      scheduler_.cancel();
      backend_->cancel();
    }
    return closing;
  }

  // False when messages have arrived for which no wake-up will follow.
  bool may_sleep() {
    const std::lock_guard lock(mutex_);
    awake_ = !inbox_.empty();
    return !awake_;
  }

  // Reports lack of memory as a failed read: an exception on this thread terminates the process.
  void add(const ReadRequest& request) {
    try {
      scheduler_.add(request);
    } catch (const std::bad_alloc&) {
      const Extent& from = request.piece[0].from;
      done_({.tag = request.tag, .error = ENOMEM, .file = from.file, .offset = from.offset});
    }
  }

  void carry_out(const BufferChange& change) {
    backend_->change_buffer(change.buffer, change.attached);
    copy_notes();
    change.then();
  }

  // If there is no memory for the notes, the earlier ones stay.
  void copy_notes() {
    try {
      std::vector<std::string> notes = backend_->notes();
      const std::lock_guard lock(mutex_);
      backend_notes_ = std::move(notes);
    } catch (const std::bad_alloc&) {
    }
  }

  void start_chunks() {
    while (const std::optional<ChunkRead> read = scheduler_.next()) backend_->submit(*read);
  }

  void report_finished() {
    while (const std::optional<ReadResult> result = scheduler_.take_finished()) done_(*result);
  }

  const OwnerProcess owner_;
  const std::shared_ptr<const FileTable> files_;
  const bool buffered_;
  const std::vector<std::string> notes_;  // of the files and of other backends
  const std::unique_ptr<Backend> backend_;
  const Done done_;

  // Used by the I/O thread alone.
  ChunkScheduler scheduler_;
  std::vector<ChunkResult> results_;
  Messages taken_;

  mutable std::mutex mutex_;
  std::condition_variable life_changed_;
  Life life_ = Life::kStarting;
  std::exception_ptr start_error_;  // set before life_ leaves kStarting
  std::vector<std::string> backend_notes_;
  Messages inbox_;
  bool awake_ = true;  // the I/O thread is awake or about to be, and will look into the inbox

  std::thread thread_;
};

void check_range(const char* name, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return;
  throw_invalid("the reader's ", name, " is ", value, "; ", min, " to ", max, " are allowed");
}

void check(const ReaderOptions& options, int64_t files, const Reader::Done& done) {
  check_range("depth", options.depth, 1, 1024);
  check_range("chunk_bytes", options.chunk_bytes, kChunkUnit, kMaxChunk);
  check_range("number of threads", options.threads, 1, 256);
  check_range("number of retries", options.retries, 0, 100);
  check_range("max_bytes_under_way", options.max_bytes_under_way, 1,
              std::numeric_limits<int64_t>::max());
  check_range("number of files", files, 1, std::numeric_limits<int32_t>::max());
  if (options.chunk_bytes % kChunkUnit != 0) {
    throw_invalid("the reader's chunk_bytes is ", options.chunk_bytes,
                  "; it must be a multiple of ", kChunkUnit);
  }
  if (!done) throw_invalid("the reader has no completion callback");
}

}  // namespace

Owned<Reader> open_reader(const ReaderOptions& options, std::span<const File> files,
                          std::span<const MemoryRegion> buffers, Reader::Done done) {
  check(options, std::ssize(files), done);
  if (options.backend != "auto" && options.backend != "uring" && options.backend != "threads") {
    throw_invalid("the reader's backend is \"", options.backend,
                  "\"; \"auto\", \"uring\" and \"threads\" are allowed");
  }
  for (const MemoryRegion& buffer : buffers) {
    if (buffer.data == nullptr || buffer.bytes == 0) {
      throw_invalid("a buffer of the reader is empty; leave it out");
    }
  }
  const auto table = std::make_shared<const FileTable>(files, options.direct);
  const int32_t drives = table->copies().drives();
  std::vector<std::string> notes = table->notes();
  if (options.backend != "threads") {
    try {
      return open_reader_over(make_uring_backend(table, buffers, drives * options.depth), options,
                              table, done, table->buffered(), notes);
    } catch (const Error& error) {
      if (options.backend == "uring" || error.kind() != ErrorKind::kInvalid) throw;
      notes.push_back(std::string(error.what()) + "; reading with a pool of threads");
    }
  }
  return open_reader_over(
      make_threads_backend(table, drives * options.threads, drives * options.depth), options, table,
      done, table->buffered(), std::move(notes));
}

Owned<Reader> open_reader_over(std::unique_ptr<Backend> backend, const ReaderOptions& options,
                               std::shared_ptr<const FileTable> files, Reader::Done done,
                               bool buffered, std::vector<std::string> notes) {
  check(options, files->files(), done);
  if (options.interpose) backend = options.interpose(std::move(backend), files);
  auto reader = make_owned<EngineReader>(options, std::move(files), std::move(backend),
                                         std::move(done), buffered, std::move(notes));
  reader->wait_until_started();
  return reader;
}

}  // namespace torch_mesh
