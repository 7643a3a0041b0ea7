#include "bindings/registry.h"

#include <c10/util/Exception.h>

#include <mutex>
#include <unordered_map>

namespace torch_mesh {
namespace {

struct Registry {
  std::mutex mutex;
  std::unordered_map<int64_t, std::shared_ptr<LiveEngine>> engines;
  int64_t next_id = 1;
};

// Never destroyed: a forward may still run on another thread while the process ends.
Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
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
  std::shared_ptr<LiveEngine> last;  // goes after the lock: its end waits for reads under way
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

  Registry& all = registry();
  std::shared_ptr<LiveEngine> live;
  {
    std::lock_guard lock(all.mutex);
    const auto found = all.engines.find(ids[0]);
    if (found != all.engines.end()) live = found->second;
  }
  if (live == nullptr || live->generation != ids[2]) {
    throw Error(ErrorKind::kClosed,
                "the pool of this handle (" + std::to_string(ids[0]) + ", generation " +
                    std::to_string(ids[2]) +
                    ") is closed: the model was unpatched or deleted; patch it again");
  }
  // Before any work: in a child there are no OpenMP threads to share it with, and waiting for them
  // would hang.
  live->engine->pool().check_process();
  const int32_t layers = live->engine->pool().layers();
  TORCH_CHECK_VALUE(ids[1] >= 0 && ids[1] < layers, "the handle names layer ", ids[1],
                    "; its pool has layers [0, ", layers, ")");
  return LayerHandle{std::move(live), static_cast<int32_t>(ids[1])};
}

std::vector<SlotState> states_of(const LayerHandle& layer) {
  const Pool& pool = layer.engine().pool();
  std::vector<SlotState> states(static_cast<size_t>(pool.experts()));
  pool.states(layer.layer, states);
  return states;
}

}  // namespace torch_mesh
