#include "bindings/runtime.h"

#include <Python.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/contention.h"
#include "base/team.h"
#include "bindings/openmp_sleeps.h"

namespace torch_mesh {
namespace {

// The extension is compiled with -fopenmp and so shares torch's OpenMP runtime. Asking for as many
// threads as torch uses reuses torch's team, and no second pool competes for the cores. A host node
// runs on a thread of a GPU's driver. It gets a team of its own, while torch's waits for the GPU.
void parallel_for_openmp(int64_t count, int team, ParallelBody body, void* context,
                         Contention& contention) {
  // An exception that leaves the region terminates the process.
  std::exception_ptr failure;
#pragma omp parallel num_threads(team)
  {
    const int64_t parts = omp_get_num_threads();
    const int64_t part = omp_get_thread_num();
    const int64_t begin = count * part / parts;
    const int64_t end = count * (part + 1) / parts;
    try {
      if (begin < end) body(context, begin, end);
    } catch (...) {
#pragma omp critical(torch_mesh_failure)
      if (failure == nullptr) failure = std::current_exception();
    }
    thread_local TimeWithoutProcessor time_without_processor;
    time_without_processor.note(contention);
  }
  if (failure != nullptr) std::rethrow_exception(failure);
}

// Runs parallel work: on torch's threads while these have the processors to themselves, else on a
// team whose idle threads sleep. Never destroyed: a forward may still run on another thread while
// the process ends.
class Computers {
 public:
  void parallel_for(int64_t count, int32_t threads, ParallelBody body, void* context) {
    const int team = static_cast<int>(std::min<int64_t>(threads, count));
    if (team <= 1 || omp_in_parallel()) {
      body(context, 0, count);
      return;
    }
    if (contended()) {
      team_.parallel_for(count, team, body, context);
    } else {
      parallel_for_openmp(count, team, body, context, contention_);
    }
  }

  bool contended() {
    // The application has placed threads that are bound to processors, so they are used.
    static const bool bound = omp_get_proc_bind() != omp_proc_bind_false;
    const bool contended = !bound && contention_.contended(Contention::recently());
    if (contended != sleeps_.load(std::memory_order_relaxed)) {
      const std::lock_guard lock(changing_);
      if (contended != (openmp_sleeps_ != nullptr)) {
        openmp_sleeps_ = contended ? std::make_unique<OpenMpSleeps>() : nullptr;
      }
      sleeps_ = contended;
    }
    return contended;
  }

 private:
  Contention contention_;
  Team team_;
  std::mutex changing_;
  std::atomic<bool> sleeps_{false};
  std::unique_ptr<OpenMpSleeps> openmp_sleeps_;
};

Computers& computers() {
  static auto* computers = new Computers;
  return *computers;
}

void parallel_for_computers(int64_t count, int32_t threads, ParallelBody body, void* context) {
  computers().parallel_for(count, threads, body, context);
}

// OpenMP's threads spin for milliseconds after a region, in case another one follows. While wait()
// runs they sleep in a region of their own.
void wait_asleep_openmp(int32_t threads, void (*wait)(void* context), void* context) {
  if (omp_in_parallel() || computers().contended()) {
    wait(context);
    return;
  }
  std::exception_ptr failure;
  std::atomic<int32_t> over{0};
#pragma omp parallel num_threads(threads)
  {
    if (omp_get_thread_num() == 0) {  // the thread that called
      try {
        wait(context);
      } catch (...) {
        failure = std::current_exception();
      }
      over = 1;
      over.notify_all();
    } else {
      over.wait(0);
    }
  }
  if (failure != nullptr) std::rethrow_exception(failure);
}

// Per thread: an exception that a signal handler raises must reach the caller whose wait it ended.
struct PendingInterrupt {
  PyObject* type = nullptr;
  PyObject* value = nullptr;
  PyObject* traceback = nullptr;
};
thread_local PendingInterrupt pending_interrupt;
thread_local bool handling_signals = false;

// Python delivers signals to its main thread only. Other threads return without the GIL: taking it
// would end them in a process that is finalizing.
bool interrupted() {
  if (syscall(SYS_gettid) != getpid() || !Py_IsInitialized()) return false;
  const PyGILState_STATE gil = PyGILState_Ensure();
  const bool nested = std::exchange(handling_signals, true);
  const bool raised = PyErr_CheckSignals() != 0;
  handling_signals = nested;
  if (raised) {
    PyErr_Fetch(&pending_interrupt.type, &pending_interrupt.value, &pending_interrupt.traceback);
  }
  PyGILState_Release(gil);
  return raised;
}

}  // namespace

const Runtime& torch_runtime() {
  static const Runtime runtime = [] {
    Runtime it;
    it.parallel_for = parallel_for_computers;
    it.wait_asleep = wait_asleep_openmp;
    it.interrupted = interrupted;
    return it;
  }();
  return runtime;
}

bool in_signal_handler() { return handling_signals; }

bool restore_interrupt() {
  if (pending_interrupt.type == nullptr) return false;
  PyErr_Restore(pending_interrupt.type, pending_interrupt.value, pending_interrupt.traceback);
  pending_interrupt = {};
  return true;
}

}  // namespace torch_mesh
