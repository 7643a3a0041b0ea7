#include "gpu/captured_calls.h"

#include <mutex>
#include <utility>

#include "base/error.h"

namespace torch_mesh {

struct CapturedCalls::Size {
  Size(const std::shared_ptr<HostWork>& work, Engine& engine, int32_t tokens, int32_t top_k)
      : work(work), buffers(work->driver(), engine, tokens, top_k) {
    for (int32_t layer = 0; layer < engine.pool().layers(); ++layer) {
      calls.push_back(std::make_unique<HostCall>(work));
    }
  }

  const std::shared_ptr<HostWork> work;  // keeps the driver alive, which frees the buffers
  CallBuffers buffers;
  std::vector<std::unique_ptr<HostCall>>
      calls;         // one for each layer; a graph that captured it refers to it by address
  Ticket first = 0;  // of the first layer; 0: none was captured yet
  bool used() const { return first > 0; }
};

CapturedCalls::Sizes CapturedCalls::make(std::span<const int32_t> tokens, int32_t top_k,
                                         Engine& engine) const {
  Sizes sizes;
  for (const int32_t size : tokens) {
    if (size < 1) throw_invalid("a capture size is ", size, " tokens; allowed: 1 or more");
    sizes.push_back(std::make_shared<Size>(work_, engine, size, top_k));
  }
  return sizes;
}

void CapturedCalls::set(Sizes sizes) {
  retire();
  sizes_ = std::move(sizes);
}

std::vector<int32_t> CapturedCalls::tokens() const {
  std::vector<int32_t> tokens;
  for (const auto& size : sizes_) tokens.push_back(size->buffers.tokens);
  return tokens;
}

Ticket CapturedCalls::take(const DeviceCall& call) {
  for (const auto& size : sizes_) {
    if (size->buffers.tokens != call.tokens || size->buffers.top_k < call.top_k) continue;
    HostCall& layer = *size->calls[call.layer];
    if (layer.buffers != nullptr &&
        (layer.call.top_k != call.top_k || layer.call.x_type != call.x_type ||
         layer.call.sentinels != call.sentinels)) {
      throw_invalid("a call of ", call.tokens,
                    " tokens was captured before with another dtype or number of experts a token; "
                    "set the capture sizes again before");
    }
    if (!size->used()) {
      size->first = next_;
      next_ += static_cast<Ticket>(size->calls.size());
    }
    layer.buffers = &size->buffers;
    return size->first + call.layer;
  }
  throw_invalid("a call of ", call.tokens,
                " tokens is being captured, for which there are no buffers: call "
                "torch_mesh.set_capture_batch_sizes(model, [",
                call.tokens, "]) before");
}

HostCall& CapturedCalls::at(Ticket ticket) const {
  std::vector<Size*> all = retired_;
  for (const auto& size : sizes_) all.push_back(size.get());
  for (const Size* size : all) {
    const Ticket layer = ticket - size->first;
    if (!size->used() || layer < 0 || layer >= std::ssize(size->calls)) continue;
    return *size->calls[layer];
  }
  throw_invalid("ticket ", ticket, " names no call");
}

// A size that a graph has captured is never destroyed, and its tickets stay valid.
void CapturedCalls::retire() {
  static auto* in_graphs = new Sizes;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  for (auto& size : sizes_) {
    if (!size->used()) continue;
    retired_.push_back(size.get());
    in_graphs->push_back(std::move(size));
  }
  sizes_.clear();
}

}  // namespace torch_mesh
