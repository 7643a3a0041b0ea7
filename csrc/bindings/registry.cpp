#include "bindings/registry.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "base/owner_process.h"

namespace torch_mesh {
namespace {

struct Registry {
  explicit Registry(int64_t first) : first_id(first), next_id(first) {}

  const OwnerProcess owner;
  const int64_t first_id;  // those below it are of the processes that this one was forked from
  std::atomic<int64_t> next_id;  // which a child reads without the lock
  std::mutex mutex;
  std::unordered_map<int64_t, std::shared_ptr<LiveEngine>> engines;
};

// Never destroyed: a forward may still run on another thread while the process ends.
std::atomic<Registry*> current{new Registry(1)};

// A child begins one of its own: at the fork another thread may have held the lock of its parent's,
// or have been within the map.
Registry& registry() {
  Registry* all = current.load();
  if (!all->owner.forked()) return *all;
  auto own = std::make_unique<Registry>(all->next_id.load());
  if (current.compare_exchange_strong(all, own.get())) return *own.release();
  return *all;  // another thread of the child was first
}

}  // namespace

std::shared_ptr<LiveEngine> register_engine(std::unique_ptr<Engine> engine) {
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  auto live = std::make_shared<LiveEngine>();
  live->engine = std::move(engine);
  live->id = all.next_id++;
  live->generation = 1;
  all.engines.emplace(live->id, live);
  return live;
}

void unregister_engine(int64_t id) {
  Registry& all = registry();
  std::shared_ptr<LiveEngine> last;  // goes after the lock, which nobody should wait for
  std::lock_guard lock(all.mutex);
  const auto found = all.engines.find(id);
  if (found == all.engines.end()) return;
  last = std::move(found->second);
  all.engines.erase(found);
}

LayerHandle resolve(const at::Tensor& handle) {
  TORCH_CHECK_VALUE(
      handle.device().is_cpu() && handle.scalar_type() == at::kLong && handle.numel() == 3,
      "a torch_mesh handle is an int64 CPU tensor [pool, layer, generation]; got ",
      handle.scalar_type(), " of shape ", handle.sizes(), " on ", handle.device());
  const at::Tensor contiguous = handle.contiguous();
  const int64_t* ids = contiguous.const_data_ptr<int64_t>();
  return resolve(HandleIds{ids[0], ids[1], ids[2]});
}

LayerHandle resolve(const HandleIds& handle) {
  Registry& all = registry();
  if (handle.pool < all.first_id && handle.pool > 0) throw_forked("the pool of this handle");
  std::shared_ptr<LiveEngine> live;
  {
    std::lock_guard lock(all.mutex);
    const auto found = all.engines.find(handle.pool);
    if (found != all.engines.end()) live = found->second;
  }
  if (live == nullptr || live->generation != handle.generation) {
    throw Error(ErrorKind::kClosed,
                "the pool of this handle (" + std::to_string(handle.pool) + ", generation " +
                    std::to_string(handle.generation) +
                    ") is closed: the model was unpatched or deleted; patch it again");
  }
  const int32_t layers = live->engine->pool().layers();
  TORCH_CHECK_VALUE(handle.layer >= 0 && handle.layer < layers, "the handle names layer ",
                    handle.layer, "; its pool has layers [0, ", layers, ")");
  return LayerHandle{std::move(live), static_cast<int32_t>(handle.layer)};
}

std::vector<SlotState> states_of(const LayerHandle& layer) {
  const Pool& pool = layer.engine().pool();
  std::vector<SlotState> states(static_cast<size_t>(pool.experts()));
  pool.states(layer.layer, states);
  return states;
}

}  // namespace torch_mesh
