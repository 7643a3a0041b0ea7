// Maps handles to engines and tables. A handle is a tensor of ids and holds no pointer, and so
// neither does a compiled or captured graph: a stale handle is an error.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "base/freeing.h"
#include "base/owner_process.h"

namespace torch_mesh {

// The ids in a handle: `pool` names an engine or tables, `layer` one of its layers or tables.
struct HandleIds {
  int64_t pool, layer;
};

// Reads the ids of a handle, as ops take it, after checks of its dtype, device and size.
HandleIds ids_of(const at::Tensor& handle);

// Ids are unique across engines and tables, so that a handle of one is never taken for one of the
// other. Atomic, since a forked child reads it without a lock.
inline std::atomic<int64_t> next_handle_id{1};

// An engine or tables, found by id. The last user hands it to `freeing`, which outlives it.
template <typename T>
struct Live {
  explicit Live(std::unique_ptr<T> made) : object(std::move(made)) {}
  ~Live() { freeing->begin(std::move(object)); }

  std::unique_ptr<T> object;
  const std::shared_ptr<Freeing> freeing = std::make_shared<Freeing>();
  int64_t id = 0;
};

// Engines or tables by id. No id is used twice.
template <typename T>
class Handles {
 public:
  static std::shared_ptr<Live<T>> add(std::unique_ptr<T> object) {
    auto live = std::make_shared<Live<T>>(std::move(object));
    Handles& all = of_process();
    const std::lock_guard lock(all.mutex_);
    live->id = next_handle_id++;
    all.live_.emplace(live->id, live);
    return live;
  }

  // Later look-ups fail. Callers that have found the object keep it alive until they end.
  static void remove(int64_t id) {
    Handles& all = of_process();
    std::shared_ptr<Live<T>> last;  // freed after the lock is released
    const std::lock_guard lock(all.mutex_);
    const auto found = all.live_.find(id);
    if (found == all.live_.end()) return;
    last = std::move(found->second);
    all.live_.erase(found);
  }

  // Throws Error(kClosed) for a stale handle, and Error(kForked) in a child of the process that
  // opened `what`.
  static std::shared_ptr<Live<T>> find(const HandleIds& handle, const char* what) {
    Handles& all = of_process();
    if (handle.pool < all.first_id_ && handle.pool > 0) throw_forked(what);
    std::shared_ptr<Live<T>> live;
    {
      const std::lock_guard lock(all.mutex_);
      const auto found = all.live_.find(handle.pool);
      if (found != all.live_.end()) live = found->second;
    }
    if (live != nullptr) return live;
    throw Error(ErrorKind::kClosed, concat(what, " (", handle.pool,
                                           ") is closed: the model was unpatched or deleted; patch "
                                           "it again, or open it anew"));
  }

 private:
  Handles() = default;

  // A forked child starts an empty map of its own: at the fork another thread may have held the
  // parent's lock, or have been changing its map. Never destroyed: a forward may still run while
  // the process ends.
  static Handles& of_process() {
    Handles* all = current_.load();
    if (!all->owner_.forked()) return *all;
    std::unique_ptr<Handles> own(new Handles);
    if (current_.compare_exchange_strong(all, own.get())) return *own.release();
    return *all;  // another thread of the child was first
  }

  static std::atomic<Handles*> current_;

  const OwnerProcess owner_;
  const int64_t first_id_ = next_handle_id.load();  // lower ids are of the parent process
  std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<Live<T>>> live_;
};

template <typename T>
std::atomic<Handles<T>*> Handles<T>::current_{new Handles<T>};

}  // namespace torch_mesh
