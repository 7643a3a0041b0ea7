#include "testing/faults.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "testing/forwarding_backend.h"

namespace torch_mesh {

namespace {

using Clock = std::chrono::steady_clock;

std::atomic<int64_t> given = 0;

// Held-back chunks are freed when this many others have completed.
constexpr int64_t kReorderDistance = 3;

constexpr uint64_t kGoldenGamma = 0x9e3779b97f4a7c15u;

// The finalizer of SplitMix64 (Steele, Lea, Flood 2014).
uint64_t mix(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

bool below(uint64_t drawn, double probability) {
  return static_cast<double>(drawn >> 11) * 0x1p-53 < probability;
}

class FaultyBackend final : public ForwardingBackend {
 public:
  FaultyBackend(std::unique_ptr<Backend> inner, std::shared_ptr<const FileTable> files,
                const Faults& faults)
      : ForwardingBackend(std::move(inner)),
        files_(std::move(files)),
        faults_(faults),
        state_(faults.seed) {}

  void start() override {
    inner_->start();
    attempts_.resize(inner_->capacity());
    held_.reserve(inner_->capacity());
  }

  void submit(const ChunkRead& read) override {
    given.fetch_add(1, std::memory_order_relaxed);
    Attempt& attempt = attempts_[read.chunk];
    // The rest of a chunk after a short read has the same end as the whole.
    const bool failed_before = attempt.failed_once && attempt.read.file == read.file &&
                               attempt.read.to + attempt.read.bytes == read.to + read.bytes;
    attempt = Attempt{.read = read, .failed_once = failed_before};
    if (const std::optional<int> error = draw_error(read, failed_before)) {
      attempt.failed_once |= *error == EIO;
      hold({.chunk = read.chunk, .result = -*error});
      return;
    }
    ChunkRead actual = read;
    if (draw(faults_.wrong_offset)) actual.offset = misplaced(read);
    inner_->submit(actual);
  }

  int32_t wait(std::chrono::microseconds timeout, std::span<ChunkResult> results) override {
    int32_t released = release(results);
    if (released > 0) return released;
    const int32_t arrived = inner_->wait(until_next_release(timeout), results);
    // All are held back first, so that `results` is free for those that are released.
    for (const ChunkResult& result : results.first(arrived)) hold(spoil(result));
    return release(results);
  }

 private:
  struct Attempt {
    ChunkRead read{
        .chunk = -1, .file = -1, .offset = -1, .bytes = 0, .to = nullptr, .descriptor = -1};
    bool failed_once = false;
  };
  struct Held {
    ChunkResult result;
    Clock::time_point not_before;
    int64_t after;           // this many completions have been handed out …
    Clock::time_point late;  // … or this moment has come
  };

  uint64_t next_random() { return mix(state_ += kGoldenGamma); }

  bool draw(double probability) {
    // Faults that are off draw no number, so that turning one on leaves the others as they were.
    return probability > 0 && below(next_random(), probability);
  }

  // In [min, max].
  int64_t draw_between(int64_t min, int64_t max) {
    return min + static_cast<int64_t>(next_random() % static_cast<uint64_t>(max - min + 1));
  }

  std::optional<int> draw_error(const ChunkRead& read, bool failed_before) {
    // Depends on the place alone: a bad sector stays bad.
    const uint64_t place = mix(mix(faults_.seed + kGoldenGamma * (read.file + 1)) ^ read.offset);
    if (faults_.eio_always > 0 && below(place, faults_.eio_always)) return EIO;
    if (!failed_before && draw(faults_.eio_once)) return EIO;
    if (draw(faults_.eintr)) return EINTR;
    if (draw(faults_.eagain)) return EAGAIN;
    return std::nullopt;
  }

  // An adjacent offset with as many bytes, if there is one.
  int64_t misplaced(const ChunkRead& read) const {
    const int64_t step = std::max<int64_t>(files_->alignment(), 512);
    const int64_t end = ::lseek(files_->descriptors()[read.descriptor], 0, SEEK_END);
    if (read.offset >= step) return read.offset - step;
    return read.offset + step + read.bytes <= end ? read.offset + step : read.offset;
  }

  ChunkResult spoil(ChunkResult result) {
    Attempt& attempt = attempts_[result.chunk];
    const ChunkRead& read = attempt.read;
    // At least one block, as from a disk: progress is certain even with a probability of 1.
    const int64_t min = files_->alignment();
    if (result.result > min && draw(faults_.short_read)) {
      result.result = draw_between(min, result.result - 1);
    }
    // The chunk is complete. Its number is used for another one next.
    if (result.result == read.bytes) attempt.failed_once = false;
    if (result.result > 0 && draw(faults_.bit_flip)) {
      const int64_t bit = draw_between(0, result.result * 8 - 1);
      read.to[bit / 8] ^= std::byte{1} << (bit % 8);
    }
    return result;
  }

  void hold(const ChunkResult& result) {
    const Clock::time_point now = Clock::now();
    Held held{.result = result, .not_before = now, .after = 0, .late = now};
    if (draw(faults_.delay)) {
      held.not_before += std::chrono::microseconds(draw_between(0, faults_.max_delay.count()));
    }
    if (draw(faults_.reorder)) {
      held.after = handed_out_ + draw_between(1, kReorderDistance);
      held.late = now + faults_.max_delay;
    }
    held_.push_back(held);
  }

  bool may_go(const Held& held, Clock::time_point now) const {
    return now >= held.not_before && (handed_out_ >= held.after || now >= held.late);
  }

  int32_t release(std::span<ChunkResult> results) {
    const Clock::time_point now = Clock::now();
    int32_t released = 0;
    for (size_t index = 0; index < held_.size() && released < std::ssize(results);) {
      if (!may_go(held_[index], now)) {
        ++index;
        continue;
      }
      results[released++] = held_[index].result;
      ++handed_out_;
      held_[index] = held_.back();
      held_.pop_back();
    }
    return released;
  }

  std::chrono::microseconds until_next_release(std::chrono::microseconds timeout) const {
    const Clock::time_point now = Clock::now();
    for (const Held& held : held_) {
      const Clock::time_point last = std::max(held.not_before, held.late);
      timeout = std::min(timeout, std::chrono::ceil<std::chrono::microseconds>(last - now));
    }
    return std::max(timeout, std::chrono::microseconds{0});
  }

  const std::shared_ptr<const FileTable> files_;
  const Faults faults_;
  uint64_t state_;
  std::vector<Attempt> attempts_;  // by chunk
  std::vector<Held> held_;
  int64_t handed_out_ = 0;
};

}  // namespace

int64_t chunks_given() { return given.load(std::memory_order_relaxed); }

Interpose with_faults(const Faults& faults) {
  const double probabilities[] = {faults.short_read, faults.eintr,      faults.eagain,
                                  faults.eio_once,   faults.eio_always, faults.delay,
                                  faults.reorder,    faults.bit_flip,   faults.wrong_offset};
  for (const double probability : probabilities) {
    // Written so that NaN is refused too.
    if (!(probability >= 0 && probability <= 1)) {
      throw_invalid("the probability of a fault is ", probability, "; 0 to 1 are allowed");
    }
  }
  if (faults.max_delay.count() < 0 || faults.max_delay > std::chrono::hours(24)) {
    throw_invalid("the longest injected delay is ", faults.max_delay.count(),
                  " microseconds; 0 to 86400000000 are allowed");
  }
  if (std::ranges::all_of(probabilities, [](double each) { return each == 0; })) return nullptr;
  return [faults](std::unique_ptr<Backend> inner, std::shared_ptr<const FileTable> files) {
    return std::make_unique<FaultyBackend>(std::move(inner), std::move(files), faults);
  };
}

}  // namespace torch_mesh
