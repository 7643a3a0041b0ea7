#include "io/foreground_reads.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace torch_mesh {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

std::unique_ptr<Backend> opened(const ReaderOptions& options,
                                const std::shared_ptr<const FileTable>& files) {
  auto backend = make_uring_backend(files, {}, options.depth, RingUse::kAnyThread);
  if (options.interpose) backend = options.interpose(std::move(backend), files);
  backend->start();
  return backend;
}

}  // namespace

ForegroundReads::ForegroundReads(const ReaderOptions& options,
                                 std::shared_ptr<const FileTable> files, Reader::Done done)
    : backend_(opened(options, files)),
      done_(std::move(done)),
      scheduler_(backend_->capacity(), options.chunk_bytes, files->alignment(), options.retries),
      results_(backend_->capacity()) {}

ForegroundReads::~ForegroundReads() {
  // The ring's memory is the parent's too: what a child took from it the parent would miss.
  if (owner_.forked()) {
    static_cast<void>(backend_.release());
    return;
  }
  scheduler_.cancel();
  backend_->cancel();
  report_finished();
  while (!idle()) wait(Clock::now() + std::chrono::seconds(1));
  backend_->stop();
}

// The scheduler has room for all of them from the start, so this allocates nothing.
void ForegroundReads::submit(std::span<const ReadRequest> requests) {
  for (const ReadRequest& request : requests) scheduler_.add(request);
}

void ForegroundReads::wait(Clock::time_point until) {
  for (;;) {
    while (const std::optional<ChunkRead> read = scheduler_.next()) backend_->submit(*read);
    const auto left = std::chrono::ceil<microseconds>(until - Clock::now());
    const int32_t count = backend_->wait(std::max(left, microseconds{0}), results_);
    for (const ChunkResult& result : std::span(results_).first(count)) {
      scheduler_.complete(result.chunk, result.result);
    }
    if (report_finished() || left <= microseconds{0}) return;
  }
}

bool ForegroundReads::report_finished() {
  bool reported = false;
  while (const std::optional<ReadResult> result = scheduler_.take_finished()) {
    done_(*result);
    reported = true;
  }
  return reported;
}

}  // namespace torch_mesh
