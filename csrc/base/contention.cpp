#include "base/contention.h"

#include <fcntl.h>
#include <unistd.h>

#include <charconv>
#include <cstdint>
#include <ctime>
#include <system_error>
#include <utility>

#include "base/descriptor.h"

namespace torch_mesh {
namespace {

// Reading takes some microseconds.
constexpr std::chrono::milliseconds kBetweenReads{20};
// A thread was idle if its last call is longer ago than this. Its waits in that gap are out of
// date. Just after it was woken it may share a processor with the thread that woke it, until the
// kernel moves it.
constexpr std::chrono::milliseconds kIdle{200};

}  // namespace

Contention::Clock::time_point Contention::recently() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return Clock::time_point(std::chrono::seconds(now.tv_sec) +
                           std::chrono::nanoseconds(now.tv_nsec));
}

// The file has nanoseconds on a processor, nanoseconds ready without one, and slices.
std::optional<std::chrono::nanoseconds> TimeWithoutProcessor::read() {
  const Descriptor file(open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC));
  char text[96];
  const ssize_t length = file.get() < 0 ? -1 : pread(file.get(), text, sizeof text, 0);
  const char* const end = text + std::max<ssize_t>(length, 0);
  const char* const gap = std::find<const char*>(text, end, ' ');
  int64_t waited = 0;
  if (gap == end || std::from_chars(gap + 1, end, waited).ec != std::errc()) return std::nullopt;
  return std::chrono::nanoseconds(waited);
}

void TimeWithoutProcessor::note(Contention& contention) {
  if (Contention::recently() - last_ < kBetweenReads) return;
  const auto now = Contention::Clock::now();
  const auto passed = now - std::exchange(last_, now);
  const auto waited = read();
  if (!waited) {
    settled_ = false;
    return;
  }
  if (passed > kIdle) {
    settled_ = false;
  } else if (settled_) {
    contention.note(now, passed, *waited - before_);
  } else {
    settled_ = true;
  }
  before_ = *waited;
}

}  // namespace torch_mesh
