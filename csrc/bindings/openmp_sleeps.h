// Lets idle threads of OpenMP sleep, on a machine that is busy with other processes too.
#pragma once

#include <omp.h>

#include <array>
#include <condition_variable>
#include <latch>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "base/start_thread.h"

namespace torch_mesh {

// libgomp's idle threads spin for milliseconds, but only for microseconds while it has more threads
// than there are processors. Where torch's team has every processor, an object of this class holds
// one thread more, so that idle threads of torch's own regions leave the processors to threads that
// compute. Elsewhere, and if the system might refuse a thread, it does nothing.
class OpenMpSleeps {
 public:
  OpenMpSleeps() {
    // A smaller team would take many threads, a larger one needs none.
    if (omp_get_max_threads() != omp_get_num_procs()) return;
    caught([this] {  // if no thread can be started, they spin
      holder_ = start_thread("a thread that OpenMP counts", [this] {
        if (!room_for_threads()) return;
#pragma omp parallel num_threads(2)
        { asm volatile(""); }  // or the compiler removes the region
        held_ = true;
        std::unique_lock lock(mutex_);
        over_.wait(lock, [this] { return ended_; });
      });
    });
  }
  ~OpenMpSleeps() { end(); }
  OpenMpSleeps(const OpenMpSleeps&) = delete;
  OpenMpSleeps& operator=(const OpenMpSleeps&) = delete;

  // Returns whether OpenMP had the thread.
  bool end() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    over_.notify_one();
    if (holder_.joinable()) holder_.join();
    return held_;
  }

 private:
  // libgomp ends the process if the system refuses it a thread. So eight others are started first:
  // those that have just ended still count for a moment, and other processes may start some.
  static bool room_for_threads() {
    std::latch over(1);
    std::array<std::thread, 8> tried;
    const bool room = !caught([&] {
      for (std::thread& each : tried) each = start_thread("a thread", [&over] { over.wait(); });
    });
    over.count_down();
    for (std::thread& each : tried) {
      if (each.joinable()) each.join();
    }
    return room;
  }

  std::mutex mutex_;
  std::condition_variable over_;
  bool ended_ = false;
  bool held_ = false;  // read after holder_ has ended
  std::thread holder_;
};

}  // namespace torch_mesh
